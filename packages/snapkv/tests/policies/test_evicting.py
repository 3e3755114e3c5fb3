"""What every policy that evicts while generating promises, step by step."""

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from snapkv import CompressedCache, InvalidArgumentError, InvalidTypeError
from snapkv.ops import ScoreOptions, attention_weights, keep_best
from snapkv.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    DecodeStep,
    DuoAttention,
    EvictingPolicy,
    Eviction,
    FastGen,
    FullCache,
    PromptLayer,
    PromptThenDecode,
    PyramidKV,
    Scissorhands,
    Selection,
    SnapKV,
    StreamingLLM,
)
from snapkv.policies.pyramidkv import exact_budgets
from snapkv.policies.scissorhands import layer_budgets
from snapkv.prefill import layer_by_layer
from tests.families import random_ids, tiny_model
from tests.ops.states import random_layer
from tests.oracle import hidden_columns, stepwise_logits, unwrapped

PROMPT, BUDGET = 60, 24
SNAPKV = SnapKV(BUDGET, window_size=8)
KINDS = {"special_ids": tuple(range(3, 12)), "punctuation_ids": tuple(range(12, 40))}


@dataclass(frozen=True)
class EveryChoice(FastGen):
    """FastGen whose heads choose in turn, whatever they attend to."""

    def _profile(self, layer, received, *others):
        heads = torch.arange(received.shape[1], device=received.device)
        return ((heads + 2 * layer.depth) % 5).expand(received.shape[:2])


@dataclass(frozen=True)
class AnyHeads(DuoAttention):
    """DuoAttention whose retrieval heads are spread over any model: some layers have none."""

    def require_heads(self, layers, kv_heads):
        """Any will do."""

    def _retrieves(self, layer):
        return tuple((layer.depth + head) % 3 == 0 for head in range(layer.num_kv_heads))


DUO = AnyHeads([[1, 0]], sink_tokens=5, recent_tokens=9)
BUDGETED = {
    "h2o": H2O(BUDGET),
    "h2o, mostly recent": H2O(heavy=4, recent=20),
    "h2o, a sliding window": H2O(heavy=0, recent=BUDGET),
    "streaming-llm": StreamingLLM(BUDGET),
    "streaming-llm, original": StreamingLLM(BUDGET, positions="original"),
    "streaming-llm, no sinks": StreamingLLM(BUDGET, start=0),
    "tova": TOVA(BUDGET),
    "scissorhands": Scissorhands(BUDGET, history=16, recent=4),
    "scissorhands, one at a time": Scissorhands(BUDGET, drop=1, recent=1, threshold="slots"),
    "scissorhands, uneven layers": Scissorhands(BUDGET, history=8, recent=4, gamma=0.5),
    "r-kv": RKV(BUDGET, evict_every=5),
    "r-kv, one at a time": RKV(BUDGET, window_size=4, evict_every=1, exempt=2),
    "snapkv, then h2o": PromptThenDecode(prompt=SNAPKV, decode=H2O(BUDGET)),
    "snapkv, then tova with room to grow": PromptThenDecode(
        prompt=SnapKV(BUDGET - 4, window_size=8), decode=TOVA(BUDGET)
    ),
    "snapkv, then scissorhands": PromptThenDecode(
        prompt=SNAPKV, decode=Scissorhands(BUDGET, drop=6)
    ),
    "snapkv, then r-kv": PromptThenDecode(
        prompt=SnapKV(BUDGET + 2, window_size=4), decode=RKV(BUDGET, evict_every=6)
    ),
    "pyramidkv, then streaming-llm": PromptThenDecode(
        prompt=PyramidKV(13, window_size=8), decode=StreamingLLM(BUDGET, positions="original")
    ),
}
METHODS = BUDGETED | {
    "fastgen, frequent and recent": FastGen(0.87, **KINDS),
    "fastgen, recent and everything": FastGen(0.975, **KINDS),
    "fastgen, every choice": EveryChoice(**KINDS),
    "duo-attention": DUO,
    "duo-attention, no sinks": replace(DUO, sink_tokens=0, recent_tokens=30),
}
MOVES_KEYS = ("streaming-llm",)  # judged by tests/policies/test_streaming.py
UNMOVED = {name: policy for name, policy in METHODS.items() if name not in MOVES_KEYS}
ROOMY = {
    "h2o": H2O(200),
    "streaming-llm": StreamingLLM(200),
    "tova": TOVA(200),
    "scissorhands": Scissorhands(200),
    "r-kv": RKV(200),
    "prompt-then-decode": PromptThenDecode(prompt=SnapKV(200), decode=H2O(200)),
    "fastgen": FastGen(1, **KINDS),
    "duo-attention": replace(DUO, recent_tokens=200),
}


@torch.no_grad()
def after_a_turn_in_parts(policy, tokens, way):
    """The last logits and what is held behind a second turn, which came in parts so large."""
    model, seen = tiny_model("llama"), 0
    cache = CompressedCache(model, policy)
    for turn, whole in enumerate(
        (random_ids(2, PROMPT), random_ids(2, 23, 1), random_ids(2, 1, 2))
    ):
        if turn < 2:
            cache.expect_prompt(seen + whole.shape[1])
        for part in whole.split(tokens, dim=1):
            cache.expect_tokens(part)
            seen += part.shape[1]
            with way(model):
                logits = model(part, past_key_values=cache).logits[:, -1]
    return logits, [cache.kept_positions(layer) for layer in range(4)]


@pytest.mark.parametrize("way", [nullcontext, partial(layer_by_layer, chunk_tokens=6)])
@pytest.mark.parametrize("name", ["tova", "h2o", "streaming-llm", "r-kv", "fastgen, every choice"])
def test_a_turn_in_parts_is_evicted_from_at_its_end(name, way):
    """As where it comes at once: no part of it sees less of what was kept."""
    if way is not nullcontext and "fastgen" in name:
        pytest.skip("refused: it looks at tokens, which come all at once")
    expected, own = after_a_turn_in_parts(METHODS[name], PROMPT, nullcontext)
    found, kept = after_a_turn_in_parts(METHODS[name], 6 if way is nullcontext else PROMPT, way)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(*pair) for pair in zip(kept, own, strict=True))


@dataclass(frozen=True)
class Summed(EvictingPolicy):
    """Keeps what the last queries attended to most, in sum, the same in so many heads."""

    name = "summed"
    query_tokens = 1
    max_decode_tokens = BUDGET
    heads: int = 1

    def select(self, layer):
        scores = self._received(layer)
        kept = keep_best(scores[:, :1], [min(BUDGET, scores.shape[-1])])
        return Selection.of(layer, kept.expand(-1, self.heads, -1), scores=scores)

    def evict(self, step):
        scores = step.scores + self._received(step)
        if scores.shape[-1] <= BUDGET:
            return Eviction(scores=scores)
        kept = keep_best(scores[:, :1], [BUDGET])
        return Eviction(keep_indices=kept.expand(-1, self.heads, -1), scores=scores)

    def _received(self, states):
        weights = attention_weights(
            states.queries[:, :, -1:], states.keys, score_options=states.score_options
        )
        return weights[:, :, -1].mean(dim=1, keepdim=True).expand(-1, self.heads, -1)


@pytest.mark.parametrize("prompt", [PROMPT, 10])
def test_scores_and_choices_of_one_head_are_those_of_all(prompt):
    model, ids = tiny_model("llama"), random_ids(2, prompt + 20)
    shared, own = (CompressedCache(model, Summed(heads=heads)) for heads in (1, 2))
    for piece in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
        with torch.no_grad():
            found, expected = (model(piece, past_key_values=cache) for cache in (shared, own))
        torch.testing.assert_close(found.logits, expected.logits)
        for layer in range(4):
            assert torch.equal(shared.kept_positions(layer), own.kept_positions(layer))


def sizes(policy, steps, tokens=PROMPT, layer=0):
    """What a layer of four stores after a prompt and after each of the tokens behind it."""
    prompt, decode = getattr(policy, "prompt", policy), getattr(policy, "decode", policy)
    budget = prompt.budget
    if isinstance(prompt, PyramidKV):
        budget = 8 + exact_budgets(prompt.budget - 8, max(tokens - 8, 5), 4, prompt.beta)[layer]
    room, drop = decode.budget, 1
    if isinstance(decode, Scissorhands):
        room = layer_budgets(decode.budget, decode.gamma, 4)[layer]
        drop = decode.drop or room // 2
        budget = room if prompt is decode else budget
    if isinstance(decode, RKV):
        room, drop = decode.budget + decode.evict_every - 1, decode.evict_every
    sizes = [min(tokens, budget)]
    for _ in range(steps):
        held = sizes[-1] + 1
        sizes.append(held if held <= room else held - drop)
    return sizes


def stored(cache):
    return [row["kept_tokens"] for row in cache.report()["layers"]]


methods = pytest.mark.parametrize("policy", METHODS.values(), ids=METHODS)
budgeted = pytest.mark.parametrize("policy", BUDGETED.values(), ids=BUDGETED)
FAMILIES = {
    "llama": ("llama", "sdpa"),
    "gemma3": ("gemma3_text", "eager"),
    "gpt_oss": ("gpt_oss", "eager"),
    "deepseek": ("deepseek_v3", "sdpa"),
}
TWO_FAMILIES_EACH = [
    pytest.param(policy, FAMILIES[family], id=f"{name}-{family}")
    for place, (name, policy) in enumerate(UNMOVED.items())
    for family in (list(FAMILIES) * 2)[2 * (place % 2) :][:2]
]


def kept_of(cache, layer, row=0, head=0):
    """Positions that a head keeps of a row, as a list."""
    kept = cache.kept_positions(layer)
    kept = kept[row, min(head, kept.shape[1] - 1)]
    return kept[kept >= 0].tolist()


@torch.no_grad()
def call(model, cache, ids, **options):
    cache.expect_tokens(ids)
    return model(ids, past_key_values=cache, **options).logits


@pytest.mark.parametrize(("policy", "family"), TWO_FAMILIES_EACH)
def test_every_step_equals_masked_full_attention(policy, family):
    model, ids = tiny_model(*family), random_ids(2, PROMPT)
    tokens = random_ids(2, 12, seed=1)
    cache = CompressedCache(model, policy)
    first = call(model, cache, ids)[:, -1]
    got, hidden = [], []
    for token in tokens.split(1, dim=1):
        hidden.append(hidden_columns(cache, cache.get_seq_length()))
        got.append(call(model, cache, token)[:, -1])
    expected = stepwise_logits(model, ids, tokens, hidden)
    torch.testing.assert_close(torch.stack(got, 1), expected[:, 1:], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(first, expected[:, 0], atol=2e-4, rtol=2e-4)


@methods
def test_a_budget_that_is_never_reached_equals_plain_transformers(policy):
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    plain = unwrapped(model, "sdpa").generate(ids, **options)
    cache = CompressedCache(model, ROOMY[policy.name])
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), plain)
    assert cache.report().kept_tokens == cache.get_seq_length()


@budgeted
def test_the_size_is_kept_at_every_step(policy):
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    cache = CompressedCache(model, policy)
    call(model, cache, ids)
    got = [stored(cache)]
    for token in random_ids(2, 30, seed=1).split(1, dim=1):
        call(model, cache, token)
        got.append(stored(cache))
    for layer in range(4):
        assert [step[layer] for step in got] == sizes(policy, 30, layer=layer)
    assert cache.layers[0].keys.untyped_storage().nbytes() == cache.layers[0].keys.nbytes


@budgeted
def test_the_size_is_kept_from_the_first_token_on(policy):
    model = tiny_model("llama")
    cache = CompressedCache(model, policy)
    expected = sizes(policy, 3 * BUDGET, tokens=1)
    for position, token in enumerate(random_ids(1, 3 * BUDGET).split(1, dim=1)):
        call(model, cache, token)
        assert cache.kept_positions(0).shape[-1] == expected[position]


@methods
@pytest.mark.parametrize("prompt_tokens", [1, PROMPT])
def test_dropped_tokens_never_return(policy, prompt_tokens):
    model, ids = tiny_model("llama"), random_ids(1, prompt_tokens + 40)
    cache = CompressedCache(model, policy)
    gone: list[set[int]] = [set()] * 8
    for token in ids.split([prompt_tokens] + [1] * 40, dim=1):
        call(model, cache, token)
        kept = [kept_of(cache, layer, head=head) for layer in range(4) for head in range(2)]
        assert not any(set(now) & before for now, before in zip(kept, gone, strict=True))
        gone = [set(range(cache.get_seq_length())) - set(now) for now in kept]


@methods
def test_left_padded_rows_evict_as_they_do_alone(policy):
    model, lengths = tiny_model("llama"), (PROMPT, 30, 10)
    rows = [random_ids(1, length, seed=length) for length in lengths]
    ids, mask = torch.zeros(2, 3, PROMPT, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, -row.shape[1] :] = row
        mask[index, -row.shape[1] :] = 1
    options = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": 0}
    cache = CompressedCache(model, policy)
    together = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    for index, row in enumerate(rows):
        alone = CompressedCache(model, policy)
        tokens = model.generate(row, past_key_values=alone, **options)
        assert together[index, PROMPT:].tolist() == tokens[0, row.shape[1] :].tolist()
        for layer in range(4):
            for head in range(2):
                kept = kept_of(cache, layer, row=index, head=head)
                assert kept == kept_of(alone, layer, head=head)


@methods
def test_chunked_prefill_equals_one_pass(policy):
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    caches = [CompressedCache(model, policy) for _ in range(2)]
    whole = model.generate(ids, past_key_values=caches[0], **options)
    pieces = model.generate(ids, past_key_values=caches[1], prefill_chunk_size=17, **options)
    assert torch.equal(whole, pieces)
    assert torch.equal(caches[0].kept_positions(3), caches[1].kept_positions(3))


@budgeted
def test_beams_keep_the_size(policy):
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    cache = CompressedCache(model, policy)
    model.generate(ids, past_key_values=cache, num_beams=3, max_new_tokens=10, pad_token_id=0)
    assert stored(cache) == [sizes(policy, 9, layer=layer)[-1] for layer in range(4)]
    assert (cache.kept_positions(0).diff(dim=-1) > 0).all()


@methods
def test_beams_carry_their_own_slots(policy):
    """The tokens of the best beam, fed one by one, leave what its row has kept."""
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    cache, alone = (CompressedCache(model, policy) for _ in range(2))
    options = {"num_beams": 3, "num_return_sequences": 3, "pad_token_id": 0}
    beams = model.generate(ids, past_key_values=cache, max_new_tokens=10, **options)
    call(model, alone, ids)
    for token in beams[:1, PROMPT:-1].split(1, dim=1):
        call(model, alone, token)
    for layer in range(4):
        rows = [[kept_of(cache, layer, row, head) for head in range(2)] for row in range(3)]
        assert [kept_of(alone, layer, head=head) for head in range(2)] in rows


@methods
def test_reordered_rows_go_on_with_what_was_noted_of_them(policy):
    model, ids, tokens = tiny_model("llama"), random_ids(2, PROMPT), random_ids(2, 30, seed=1)
    caches = [CompressedCache(model, policy) for _ in range(2)]
    for cache in caches:
        call(model, cache, ids)
    caches[1].reorder_cache(torch.tensor([1, 0]))
    for token in tokens.split(1, dim=1):
        call(model, caches[0], token)
        call(model, caches[1], token.flip(0))
    for layer in range(4):
        kept, swapped = (cache.kept_positions(layer) for cache in caches)
        assert torch.equal(kept, swapped.flip(0))


@methods
def test_drafts_are_refused_before_any_work(policy):
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    cache = CompressedCache(model, policy)
    with pytest.raises(InvalidArgumentError, match=rf"policy.*{policy.name}.*without drafts"):
        model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=4)
    assert cache.get_seq_length() == 0


@methods
def test_what_is_whole_at_the_end_can_be_cropped(policy):
    model = tiny_model("llama")
    cache = CompressedCache(model, policy)
    call(model, cache, random_ids(1, PROMPT))
    with pytest.raises(InvalidArgumentError, match="still whole"):
        cache.crop(-BUDGET)


# Worked examples: keys are unit vectors and queries the logarithms of the wanted rows.


def states(rows, slots, scores=None, fillers=None):
    """A layer of one head whose attention is exactly `rows`, given for the last queries."""
    weights = torch.zeros(len(rows), slots)
    for index, row in enumerate(rows):
        weights[index, : len(row)] = torch.tensor(row)
    queries = weights.clamp(min=1e-30).log()[None, None]
    keys = torch.eye(slots)[None, None]
    common = {
        "queries": queries,
        "keys": keys,
        "score_options": ScoreOptions(scaling=1.0),
        "layer_idx": 0,
    }
    if scores is None:
        return PromptLayer(**common, values=keys)
    columns = torch.arange(slots)[None, None]
    given = {"columns": columns, "seen_tokens": slots, "filler_tokens": fillers}
    return DecodeStep(**common, **given, scores=scores)


PROMPT_ROWS = [
    [1.0],
    [0.5, 0.5],
    [0.6, 0.1, 0.3],
    [0.5, 0.1, 0.3, 0.1],
    [0.4, 0.1, 0.3, 0.1, 0.1],
    [0.3, 0.05, 0.25, 0.05, 0.15, 0.2],
]
DECODE_ROW = [0.3, 0.1, 0.35, 0.05, 0.2]  # over the positions 0, 2, 4, 5, 6


def test_h2o_by_hand():
    policy = H2O(heavy=2, recent=2)
    selection = policy.select(states(PROMPT_ROWS, 6))
    sums = torch.tensor([3.3, 0.85, 1.15, 0.25, 0.25, 0.2])
    torch.testing.assert_close(selection.scores[0, 0], sums)
    assert selection.keep_indices.tolist() == [[[0, 2, 4, 5]]]
    noted = torch.tensor([[[3.3, 1.15, 0.25, 0.2, 0.0]]])
    eviction = policy.evict(states([DECODE_ROW], 5, noted))
    after = torch.tensor([3.6, 1.25, 0.6, 0.25, 0.2])
    torch.testing.assert_close(eviction.scores[0, 0], after)
    assert eviction.keep_indices.tolist() == [[[0, 1, 3, 4]]], "token 4 goes, tokens 5 and 6 stay"


def test_h2o_adds_one_per_query_and_never_lowers_a_score():
    policy = H2O(heavy=2, recent=2)
    selection = policy.select(states(PROMPT_ROWS, 6))
    assert math.isclose(float(selection.scores.sum()), 6.0, rel_tol=1e-5)
    noted = torch.tensor([[[3.3, 1.15, 0.25, 0.2, 0.0]]])
    scores = policy.evict(states([DECODE_ROW], 5, noted)).scores
    assert math.isclose(float((scores - noted).sum()), 1.0, rel_tol=1e-5)
    assert (scores >= noted).all()


def test_tova_by_hand():
    eviction = TOVA(4).evict(states([DECODE_ROW], 5, torch.zeros(1, 1, 5)))
    assert eviction.keep_indices.tolist() == [[[0, 1, 2, 4]]], "position 5 has the least attention"


def test_tova_has_no_memory():
    policy, noted = TOVA(3), torch.tensor([[[9.0, 0, 0, 0, 0]]])
    one = policy.evict(states([DECODE_ROW], 5, noted))
    other = policy.evict(states([DECODE_ROW], 5, noted.flip(-1)))
    assert torch.equal(one.keep_indices, other.keep_indices)


def test_streaming_llm_by_hand():
    selection = StreamingLLM(start=2, recent=3).select(states([[0.1] * 10], 10))
    assert selection.keep_indices.tolist() == [[[0, 1, 7, 8, 9]]]


def test_two_methods_by_hand():
    """SnapKV keeps what H2O would drop, and H2O goes on with its own sums of those kept."""
    policy = PromptThenDecode(prompt=SnapKV(4, window_size=1, kernel_size=1), decode=H2O(4))
    selection = policy.select(states([*PROMPT_ROWS[:5], [0.1, 0.2, 0.1, 0.25, 0.15, 0.2]], 6))
    assert selection.keep_indices.tolist() == [[[1, 3, 4, 5]]], "the last query alone votes"
    sums = torch.tensor([3.1, 1.0, 1.0, 0.45, 0.25, 0.2])
    torch.testing.assert_close(selection.scores[0, 0], sums)
    noted = selection.scores[..., [1, 3, 4, 5]]
    step = states([[0.05, 0.5, 0.15, 0.1, 0.2]], 5, torch.nn.functional.pad(noted, (0, 1)))
    eviction = policy.evict(step)
    torch.testing.assert_close(
        eviction.scores[0, 0], torch.tensor([1.05, 0.95, 0.4, 0.3, 0.2]), msg=str(eviction.scores)
    )
    assert eviction.keep_indices.tolist() == [[[0, 1, 3, 4]]]


def test_sums_are_per_query_head_where_that_is_what_is_stored():
    """As in a model that has a KV head for every query head."""
    policy = PromptThenDecode(
        prompt=SnapKV(6, window_size=2, group_reduce="none"), decode=H2O(heavy=4, recent=4)
    )
    grouped = random_layer(0, query_heads=4, kv_heads=2, prompt_tokens=20, query_tokens=20)
    twins = {name: getattr(grouped, name).repeat_interleave(2, 1) for name in ("keys", "values")}
    apart = policy.select(replace(grouped, **twins))
    together = policy.select(grouped)
    assert torch.equal(together.keep_indices, apart.keep_indices)
    torch.testing.assert_close(together.scores, apart.scores)
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    cache = CompressedCache(model, policy)
    model.generate(ids, past_key_values=cache, max_new_tokens=12, pad_token_id=0)
    assert cache.kept_positions(0).shape == (2, 8, 8)


@pytest.mark.parametrize(
    "policy", [H2O(BUDGET), Scissorhands(BUDGET, drop=2), EveryChoice(**KINDS)], ids=str
)
def test_copying_a_cache_copies_what_was_noted(policy):
    model = tiny_model("llama")
    cache = CompressedCache(model, policy)
    call(model, cache, random_ids(1, PROMPT))
    other = copy.deepcopy(cache)
    tokens = random_ids(1, 5, seed=1)
    for token in tokens.split(1, dim=1):
        assert torch.equal(call(model, cache, token), call(model, other, token))
    assert isinstance(DynamicCache(config=model.config), DynamicCache)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: H2O(10, recent=10, heavy=1), r"budget: expected heavy \+ recent"),
        (lambda: H2O(10, recent=11), "heavy=-1"),
        (lambda: H2O(recent=0, heavy=4), "recent: expected at least 1"),
        (lambda: StreamingLLM(4), r"start \+ recent.*a budget of at least 5"),
        (lambda: StreamingLLM(start=-1), "start: expected at least 0"),
        (lambda: StreamingLLM(positions="slot"), "positions: expected one of cache, original"),
        (lambda: TOVA(0), "budget: expected at least 1"),
        (lambda: Scissorhands(10), "budget: expected room.*of at least 11"),
        (lambda: Scissorhands(64, drop=55), "recent=10.* drop=55 that go, got 64.*at least 65"),
        (lambda: Scissorhands(20, gamma=0.5), r"gamma up to 0.449, or.* least 22, would"),
        (lambda: Scissorhands(64, gamma=1), "gamma: expected a number from 0 to below 1"),
        (lambda: Scissorhands(64, threshold="mean"), "threshold: expected one of tokens, slots"),
        (lambda: Scissorhands(64, recent=0), "recent: expected at least 1"),
    ],
)
def test_impossible_budgets_say_what_would_be_possible(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"prompt": H2O(64)}, InvalidTypeError, "prompt: expected a method that only.*got h2o"),
        ({"prompt": 64}, InvalidTypeError, "prompt: expected a method that only.*got 64"),
        ({"decode": SnapKV(64)}, InvalidTypeError, "decode: expected a method that.*got snapkv"),
        ({"decode": PromptThenDecode()}, InvalidTypeError, "decode.*got prompt-then-decode"),
        ({"prompt": AdaKV(SnapKV(64))}, InvalidArgumentError, r"same for all heads.*got AdaKV"),
        (
            {"prompt": FullCache()},
            InvalidArgumentError,
            r"prompt: .*FullCache.*SnapKV\(budget=1024",
        ),
        ({"prompt": SnapKV(keep_ratio=0.5)}, InvalidArgumentError, "prompt: .*keep_ratio=0.5"),
        ({"prompt": SnapKV(64), "decode": TOVA(63)}, InvalidArgumentError, "least 64"),
        ({"decode": FastGen()}, InvalidArgumentError, "decode: .*same for all heads.*FastGen"),
        ({"decode": DUO}, InvalidArgumentError, "decode: .*hold different numbers of tokens"),
        ({"prompt": PyramidKV(64), "decode": H2O(95)}, InvalidArgumentError, "96 tokens.*pyramid"),
    ],
    ids=str,
)
def test_methods_that_do_not_go_together_are_refused(parts, error, message):
    with pytest.raises(error, match=message):
        PromptThenDecode(**parts)
