"""FastGen by hand, its profile against the whole matrix, and what each kind of head holds.

What it shares with the other methods that evict is in `test_evicting.py`.
"""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from snapkv import (
    CacheMismatchError,
    CompressedCache,
    FastGen,
    InvalidArgumentError,
    InvalidTypeError,
)
from snapkv.cache.reading import Reading
from snapkv.ops import (
    ScoreOptions,
    attention_received,
    attention_received_by_distance,
    attention_to_stored,
    attention_weights,
    kept_indices,
)
from snapkv.policies import DecodeStep, PromptLayer
from snapkv.policies.fastgen import FREQUENT, FULL, LOCAL, PUNCTUATION, SPECIAL
from snapkv.policies.tokens import found, punctuation_tokens, special_tokens
from tests.families import random_ids, tiny_config, tiny_model
from tests.ops.states import pad_left, random_layer
from tests.oracle import unwrapped
from tests.policies.test_evicting import KINDS, PROMPT, EveryChoice, call, kept_of

ROWS = [
    [1.0],
    [0.9, 0.1],
    [0.8, 0.1, 0.1],
    [0.7, 0.05, 0.2, 0.05],
    [0.6, 0.05, 0.25, 0.05, 0.05],
]
IDS = [1, 10, 5, 11, 12]  # <s> A . B C
BY_HAND = {"special_ids": (1,), "punctuation_ids": (5, 6)}
FIFTHS = {"local_ratio": 0.2, "frequent_ratio": 0.2}  # one token each


def attention_of(rows, slots):
    """Queries and keys of one head whose attention is exactly `rows`."""
    weights = torch.zeros(len(rows), slots)
    for index, row in enumerate(rows):
        weights[index, : len(row)] = torch.tensor(row)
    return {
        "queries": weights.clamp(min=1e-30).log()[None, None],
        "keys": torch.eye(slots)[None, None],
    }


def prompt_of(rows, ids):
    states = attention_of(rows, len(ids))
    return PromptLayer(
        **states,
        values=states["keys"],
        token_ids=torch.tensor([ids]),
        score_options=ScoreOptions(scaling=1.0),
        layer_idx=0,
    )


@pytest.mark.parametrize(
    ("recovery", "choice", "kept"),
    [
        (0.75, SPECIAL, [0]),
        (0.90, PUNCTUATION, [0, 2]),
        (0.95, FREQUENT, [0, 1, 2]),
        (0.985, LOCAL, [0, 1, 2, 4]),
    ],
)
def test_the_profile_by_hand(recovery, choice, kept):
    """Retained: special .80, + punctuation .91, + token 1 .97, + the query itself .99."""
    selection = FastGen(recovery, **BY_HAND, **FIFTHS).select(prompt_of(ROWS, IDS))
    assert selection.head_notes.tolist() == [[[choice, 1]]]
    assert selection.keep_indices.tolist() == [[kept]]


@pytest.mark.parametrize("recovery", [0.995, 1.0])
def test_where_nothing_else_recovers_enough_everything_is_kept(recovery):
    selection = FastGen(recovery, **BY_HAND, **FIFTHS).select(prompt_of(ROWS, IDS))
    assert selection.keep_indices.tolist() == [[[0, 1, 2, 3, 4]]]
    assert selection.head_notes is None


def test_everything_is_kept_although_rounding_leaves_less_than_all_attention():
    """The first token is special and gets all attention, and still 1 means everything."""
    rows = [[1.0 - 1e-3] + [0.0] * index for index in range(4)]
    selection = FastGen(1.0, **BY_HAND).select(prompt_of(rows, [1, 10, 11, 12]))
    assert selection.keep_indices.tolist() == [[[0, 1, 2, 3]]]


# A step over the positions 0, 1, 2, 4 and the new 5, whose row is .5 .2 .1 .15 .05.
STEP_ROW = [0.5, 0.2, 0.1, 0.15, 0.05]
HELD = [0, 1, 2, 4, 5]
INF = float("inf")


def step_of(choice, token, *, held=HELD, noted=(INF, 0.3, INF, 0.05)):
    """The step by hand: tokens 0 and 2 are special and punctuation, 1 and 4 words."""
    return DecodeStep(
        **attention_of([STEP_ROW], 5),
        score_options=ScoreOptions(scaling=1.0),
        layer_idx=0,
        columns=torch.tensor([[held]]),
        seen_tokens=held[-1] + 1,
        scores=torch.tensor([[[*noted, 0.0]]]),
        head_notes=torch.tensor([[[choice, 1]]]),
        token_ids=torch.tensor([[token]]),
    )


@pytest.mark.parametrize(
    ("choice", "token", "kept"),
    [
        (SPECIAL, 13, [0, 2]),  # what was noted as this head's kinds stays
        (SPECIAL, 5, [0, 2]),  # punctuation is not among them
        (SPECIAL, 1, [0, 2, 4]),
        (PUNCTUATION, 13, [0, 2]),
        (PUNCTUATION, 5, [0, 2, 4]),
        (FREQUENT, 13, [0, 1, 2]),  # .3 + .2 for token 1, .05 + .15 for token 4, .05 for the new
        (FREQUENT, 6, [0, 1, 2, 4]),
        (LOCAL, 13, [0, 1, 2, 4]),  # the new one is the last one
    ],
)
def test_a_step_by_hand(choice, token, kept):
    eviction = FastGen(**BY_HAND, **FIFTHS).evict(step_of(choice, token))
    assert eviction.keep_indices.tolist() == [[kept]]


def test_a_full_head_among_others_keeps_every_new_token():
    step = step_of(FULL, 13, noted=(INF,) * 4)
    assert FastGen(**BY_HAND, **FIFTHS).evict(step).keep_indices.tolist() == [[[0, 1, 2, 3, 4]]]


def test_attention_is_added_up_by_hand():
    eviction = FastGen(**BY_HAND, **FIFTHS).evict(step_of(FREQUENT, 13))
    expected = torch.tensor([INF, 0.5, INF, 0.2, 0.05])
    torch.testing.assert_close(eviction.scores[0, 0], expected)


def test_more_tokens_are_frequent_as_the_text_grows():
    """Ten tokens seen: a fifth is two. The new one takes the place that falls free."""
    step = step_of(FREQUENT, 13, held=[0, 1, 2, 8, 9], noted=(INF, 0.3, INF, 0.0))
    policy = FastGen(**BY_HAND, **FIFTHS)
    assert policy.evict(step).keep_indices.tolist() == [[[0, 1, 2, 3]]]
    assert policy.evict(replace(step, seen_tokens=9)).keep_indices.tolist() == [[[0, 1, 2]]]


def test_a_full_layer_is_left_alone():
    step = replace(step_of(FULL, 13), head_notes=None)
    assert FastGen(**BY_HAND).evict(step).keep_indices is None


# The profile, from two sums per token, against the whole matrix in float64.


def whole_matrix(layer, row):
    """(Hq, tokens, tokens) float64 of a row without its pads."""
    pads = 0 if layer.pad_tokens is None else int(layer.pad_tokens[row])
    queries, keys = layer.queries[row, :, pads:].double(), layer.keys[row, :, pads:].double()
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], dim=0)
    options = layer.score_options
    scores = queries @ keys.transpose(-1, -2) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    causal = torch.ones(scores.shape[-2:]).tril().bool()
    scores = scores.masked_fill(~causal, float("-inf"))
    if options.sink_logits is None:
        return scores.softmax(-1)
    sinks = options.sink_logits.double().view(-1, 1, 1).expand(-1, scores.shape[-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def recovered_by_definition(policy, layer, row, head):
    """What each choice but everything recovers: 1 minus the mean of what it loses of each row."""
    group = layer.queries.shape[1] // layer.keys.shape[1]
    weights = whole_matrix(layer, row)[head * group : (head + 1) * group].mean(0)
    tokens = weights.shape[0]
    ids = layer.token_ids[row, -tokens:].tolist()
    kept = {t for t in range(tokens) if ids[t] in policy.special_ids}
    recovered = [kept]
    kept = kept | {t for t in range(tokens) if ids[t] in policy.punctuation_ids}
    recovered.append(kept)
    received = weights.sum(0)
    others = sorted((t for t in range(tokens) if t not in kept), key=lambda t: -float(received[t]))
    kept = kept | set(others[: max(1, int(tokens * policy.frequent_ratio))])
    recovered.append(kept)
    near = max(1, int(tokens * policy.local_ratio))

    def lost(query, stays):
        return sum(float(weights[query, t]) for t in range(query + 1) if not stays(query, t))

    rules = [lambda _, t, chosen=chosen: t in chosen for chosen in recovered]
    rules.append(lambda query, t: t in kept or query - t < near)
    return [1 - sum(lost(q, rule) for q in range(tokens)) / tokens for rule in rules]


def profiled(policy, layer):
    """(B, Hkv) choices; what `select` notes, or everything."""
    notes = policy.select(layer).head_notes
    heads = layer.keys.shape[:2]
    return torch.full(heads, FULL) if notes is None else notes[..., 0]


def with_ids(layer, seed):
    ids = random_ids(layer.keys.shape[0], layer.keys.shape[2], seed=seed)
    return replace(layer, token_ids=ids)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    recovery=st.floats(0.05, 0.999),
    kv_heads=st.sampled_from([1, 2, 4]),
    extras=st.sampled_from([{}, {"softcap": 1.5}, {"with_sinks": True}]),
)
def test_the_profile_equals_its_definition(seed, lengths, recovery, kv_heads, extras):
    rows = [
        random_layer(
            seed, kv_heads=kv_heads, prompt_tokens=n, query_tokens=n, sharpness=4, **extras
        )
        for n in lengths
    ]
    layer = with_ids(pad_left(rows, query_tokens=max(lengths)), seed)
    policy = FastGen(recovery, special_ids=tuple(range(40)), punctuation_ids=tuple(range(40, 70)))
    choices = profiled(policy, layer)
    for row in range(len(lengths)):
        for head in range(kv_heads):
            recovered = recovered_by_definition(policy, layer, row, head)
            assert recovered == sorted(recovered), "each choice recovers what the one before does"
            if min(abs(part - recovery) for part in recovered) < 1e-5:
                continue  # rounding may decide
            enough = [part >= recovery for part in recovered]
            assert int(choices[row, head]) == [*enough, True].index(True)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), tokens=st.integers(2, 40))
def test_more_recovery_costs_more_tokens(seed, tokens):
    layer = with_ids(
        random_layer(seed, prompt_tokens=tokens, query_tokens=tokens, sharpness=4), seed
    )
    counts, choices = [], []
    for recovery in (0.01, 0.3, 0.6, 0.9, 0.97, 1.0):
        policy = FastGen(recovery, **KINDS)
        selection = policy.select(layer)
        counts.append((selection.keep_indices >= 0).sum(-1))
        choices.append(profiled(policy, layer))
    for few, many in itertools.pairwise(counts):
        assert (few <= many).all()
    for cheap, dear in itertools.pairwise(choices):
        assert (cheap <= dear).all()
    assert (counts[-1] == tokens).all()


@pytest.mark.parametrize("block_tokens", [1, 7, 64])
@pytest.mark.parametrize("pads", [None, [0, 9]], ids=str)
def test_the_sums_do_not_depend_on_the_blocks(block_tokens, pads):
    layer = random_layer(3, batch=2, prompt_tokens=23, query_tokens=23)
    pads = None if pads is None else torch.tensor(pads)
    options = {"score_options": layer.score_options, "pad_tokens": pads}
    near = torch.tensor([4, 11])
    received, far = attention_received_by_distance(
        layer.queries, layer.keys, near_tokens=near, block_tokens=block_tokens, **options
    )
    torch.testing.assert_close(received, attention_received(layer.queries, layer.keys, **options))
    weights = attention_weights(layer.queries, layer.keys, **options)
    distance = torch.arange(23)[:, None] - torch.arange(23)
    expected = (weights * (distance >= near[:, None, None, None])).sum(-2)
    torch.testing.assert_close(far, expected)


@pytest.mark.parametrize("block_tokens", [2, 64])
def test_attention_to_what_is_stored_equals_that_to_the_whole_where_nothing_was_dropped(
    block_tokens,
):
    layer = random_layer(4, batch=2, prompt_tokens=23, query_tokens=5)
    pads = torch.tensor([0, 20])  # two of the second row's queries are pads themselves
    got = attention_to_stored(
        layer.queries,
        layer.keys,
        columns=torch.arange(23).expand(2, 2, 23),
        seen_tokens=23,
        score_options=layer.score_options,
        pad_tokens=pads,
        block_tokens=block_tokens,
    )
    options = {"score_options": layer.score_options, "pad_tokens": pads}
    torch.testing.assert_close(got, attention_received(layer.queries, layer.keys, **options))


def test_attention_to_what_is_stored_leaves_out_slots_without_a_token():
    layer = random_layer(4, batch=1, prompt_tokens=9, query_tokens=1)
    columns = torch.arange(9).expand(1, 2, 9).clone()
    columns[0, 0, :3] = -1
    options = {"score_options": layer.score_options}
    got = attention_to_stored(layer.queries, layer.keys, columns=columns, seen_tokens=9, **options)
    alone = attention_received(layer.queries[:, :2], layer.keys[:, :1, 3:], **options)
    torch.testing.assert_close(got[:, :2, 3:], alone)
    assert (got[:, :2, :3] == 0).all()


def test_kept_slots_as_indices_by_hand():
    kept = torch.tensor([[[1, 0, 1, 1], [0, 0, 0, 1]], [[0, 0, 0, 0], [1, 1, 0, 0]]]).bool()
    assert kept_indices(kept).tolist() == [
        [[0, 2, 3], [-1, -1, 3]],
        [[-1, -1, -1], [-1, 0, 1]],
    ]


# What the heads of a model hold, step by step.


def frequent_words(words, policy):
    """How many words a head holds as frequent ones, `words` being whether each token is one.

    A place that falls free as the text grows is taken by the next word; none has been put aside.
    """
    held = min(int(PROMPT * policy.frequent_ratio), sum(words[:PROMPT]))
    for seen in range(PROMPT + 1, len(words) + 1):
        held = min(int(seen * policy.frequent_ratio), held + words[seen - 1])
    return held


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_every_head_holds_its_kinds_at_every_step(family):
    model, policy = tiny_model(family), EveryChoice(**KINDS)
    ids, tokens = random_ids(2, PROMPT), random_ids(2, 30, seed=1)
    cache = CompressedCache(model, policy)
    marks = {SPECIAL: set(policy.special_ids)}
    marks[PUNCTUATION] = marks[SPECIAL] | set(policy.punctuation_ids)
    for piece in (ids, *tokens.split(1, dim=1)):
        call(model, cache, piece)
        seen = torch.cat([ids, tokens], 1)[:, : cache.get_seq_length()].tolist()
        for depth, layer in enumerate(cache.compressed_layers):
            for row, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
                choice = (head + 2 * depth) % 5
                kept, so_far = kept_of(cache, layer, row, head), seen[row]
                kinds = marks[min(choice, PUNCTUATION)]
                marked = [t for t, token in enumerate(so_far) if token in kinds]
                assert set(marked) <= set(kept)
                words = [token not in kinds for token in so_far]
                window = int(PROMPT * policy.local_ratio)
                if choice in marks:
                    assert kept == marked
                elif choice == FULL:
                    assert kept == list(range(len(so_far)))
                elif choice == FREQUENT:
                    assert len(kept) == len(marked) + frequent_words(words, policy)
                else:
                    assert kept[-window:] == list(range(len(so_far) - window, len(so_far)))
                    frequent = len(kept) - len(marked) - sum(words[-window:])
                    most = int(len(so_far) * policy.frequent_ratio)
                    assert most - window <= frequent <= most


@pytest.mark.parametrize("policy", [EveryChoice(**KINDS), FastGen(0.87, **KINDS)], ids=str)
def test_the_bytes_are_those_of_the_tokens_kept_at_every_step(policy):
    model = tiny_model("llama")
    cache = CompressedCache(model, policy)
    for piece in random_ids(2, PROMPT + 9).split([PROMPT] + [1] * 9, dim=1):
        call(model, cache, piece)
        for layer in cache.layers:
            kept = int((cache.kept_positions(layer.identity.layer_idx) >= 0).sum())
            assert layer.held_bytes == kept * layer.keys.shape[-1] * 2 * layer.keys.element_size()
            keys = layer.store.ragged.keys
            assert keys.untyped_storage().nbytes() == keys.nbytes


@pytest.mark.parametrize("kv_heads", [1, 2, 8], ids=["MQA", "GQA", "MHA"])
def test_whatever_the_groups_are_eager_and_sdpa_agree(kv_heads):
    torch.manual_seed(0)
    model = type(tiny_model("llama"))(tiny_config("llama", num_key_value_heads=kv_heads)).eval()
    ids, tokens = random_ids(2, PROMPT), random_ids(2, 6, seed=1)
    results = []
    for implementation in ("sdpa", "eager"):
        reference = unwrapped(model, implementation)
        cache = CompressedCache(reference, EveryChoice(**KINDS))
        call(reference, cache, ids)
        results.append(torch.cat([call(reference, cache, t) for t in tokens.split(1, 1)], 1))
        assert cache.kept_positions(0).shape[1] == kv_heads
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_tokens_that_come_together_are_kept_by_their_kind():
    """A second turn: several tokens at once, then one by one."""
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    cache = CompressedCache(model, EveryChoice(**KINDS))
    options = {"do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    first = model.generate(ids, max_new_tokens=5, **options)
    turn = torch.cat([first, random_ids(1, 9, seed=3)], dim=1)
    whole = model.generate(turn, max_new_tokens=4, **options)[0, :-1].tolist()
    kinds = {*KINDS["special_ids"], *KINDS["punctuation_ids"]}
    marked = [t for t, token in enumerate(whole) if token in kinds]
    assert kept_of(cache, 0, head=1) == marked
    assert kept_of(cache, 2, head=0) == list(range(len(whole)))


def test_reordered_rows_take_their_tokens_and_their_choices_along():
    """Swapped between two pieces of the prompt, and again behind it."""
    model, ids, tokens = tiny_model("llama"), random_ids(2, PROMPT), random_ids(2, 12, seed=1)
    plain, swapped = (CompressedCache(model, FastGen(0.87, **KINDS)) for _ in range(2))
    for cache in (plain, swapped):
        cache.expect_prompt(PROMPT)
        call(model, cache, ids[:, :30])
    swapped.reorder_cache(torch.tensor([1, 0]))
    call(model, plain, ids[:, 30:])
    call(model, swapped, ids[:, 30:].flip(0))
    swapped.reorder_cache(torch.tensor([1, 0]))
    choices = plain.layers[0].notes.head_notes[..., 0]
    assert not torch.equal(choices[0], choices[1])
    for token in tokens.split(1, dim=1):
        call(model, plain, token)
        call(model, swapped, token)
    for layer in range(4):
        assert torch.equal(plain.kept_positions(layer), swapped.kept_positions(layer))


def test_heads_may_hold_nothing_at_all():
    """No token is special and none is punctuation: two of the heads are empty after every step."""
    model, policy = tiny_model("llama"), EveryChoice(special_ids=(), punctuation_ids=())
    cache = CompressedCache(model, policy)
    ids, options = random_ids(2, PROMPT), {"max_new_tokens": 6, "pad_token_id": 0}
    model.generate(ids, past_key_values=cache, num_beams=2, **options)
    assert cache.kept_positions(0).shape == (4, 2, 0)
    assert cache.layers[0].held_bytes == 0
    assert cache.get_seq_length() == PROMPT + 5


def test_two_prompts_in_sequence_equal_fresh_caches():
    model = tiny_model("llama")
    policy, options = FastGen(0.87, **KINDS), {"max_new_tokens": 8, "pad_token_id": 0}
    cache = CompressedCache(model, policy)
    for seed, batch in ((1, 2), (2, 1), (3, 3)):
        ids = random_ids(batch, PROMPT + seed, seed=seed)
        cache.reset()
        fresh = CompressedCache(model, policy)
        again = model.generate(ids, past_key_values=cache, **options)
        assert torch.equal(again, model.generate(ids, past_key_values=fresh, **options))
        assert cache.report() == fresh.report()


# Who says which tokens come.


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "in pieces": {"prefill_chunk_size": 17},
}


@pytest.mark.parametrize("mode", MODES)
def test_generate_says_which_tokens_every_pass_reads(mode, monkeypatch):
    """In the order of the rows, as the model itself gets them."""
    model, announced, read = tiny_model("llama"), [], []
    expect_tokens = Reading.expect_tokens

    def spy(self, token_ids):
        announced.append(token_ids)
        expect_tokens(self, token_ids)

    monkeypatch.setattr(Reading, "expect_tokens", spy)
    watch = model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True
    )
    try:
        ids = random_ids(2, PROMPT)
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        cache = CompressedCache(model, FastGen(0.8, **KINDS))
        model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=8,
            pad_token_id=0,
            **MODES[mode],
        )
    finally:
        watch.remove()
    assert len(announced) == len(read) > 7
    assert all(torch.equal(told, got) for told, got in zip(announced, read, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # the first layer slides in the second
def test_tokens_that_nobody_announced_are_refused_before_any_are_stored(family):
    model, ids = tiny_model(family), random_ids(2, PROMPT)
    cache = CompressedCache(model, FastGen(0.8, **KINDS))
    with pytest.raises(CacheMismatchError, match=r"token_ids: .* 2 x 60 .* got none; .*expect_tok"):
        model(ids, past_key_values=cache)
    cache.expect_tokens(ids[:1])
    with pytest.raises(CacheMismatchError, match=r"got those of \(1, 60\)"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0
    fresh = CompressedCache(model, FastGen(0.8, **KINDS))
    assert torch.equal(call(model, cache, ids), call(model, fresh, ids))
    for token in ids[:, :2].split(1, dim=1):
        with pytest.raises(CacheMismatchError, match="got none"):  # what was read is not to come
            model(token, past_key_values=cache)
        assert torch.equal(call(model, cache, token), call(model, fresh, token))


def test_ids_that_are_none_are_refused():
    cache = CompressedCache(tiny_model("llama"), FastGen(0.8, **KINDS))
    for wrong in ([1, 2], torch.zeros(3, dtype=torch.long), torch.zeros(1, 3)):
        with pytest.raises(InvalidTypeError, match=r"token_ids: expected a .batch, tokens. tensor"):
            cache.expect_tokens(wrong)


def test_a_prompt_read_in_pieces_is_profiled_as_one():
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    whole, pieces = (CompressedCache(model, FastGen(0.87, **KINDS)) for _ in range(2))
    call(model, whole, ids)
    pieces.expect_prompt(PROMPT)
    for piece in ids.split(23, dim=1):
        call(model, pieces, piece)
    for layer in range(4):
        assert torch.equal(whole.kept_positions(layer), pieces.kept_positions(layer))


def test_a_piece_can_be_taken_back_before_the_prompt_ends():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    whole, cache = (CompressedCache(model, FastGen(0.87, **KINDS)) for _ in range(2))
    call(model, whole, ids)
    cache.expect_prompt(PROMPT)
    call(model, cache, torch.cat([ids[:, :20], random_ids(1, 9, seed=5)], 1))
    cache.crop(-9)
    call(model, cache, ids[:, 20:])
    for layer in range(4):
        assert torch.equal(whole.kept_positions(layer), cache.kept_positions(layer))
    with pytest.raises(InvalidArgumentError, match=r"at most 0.* still whole"):
        cache.crop(-1)


def test_tokens_behind_the_prompt_in_the_same_pass_are_kept_by_their_kind():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    cache = CompressedCache(model, EveryChoice(**KINDS))
    cache.expect_prompt(PROMPT - 10)
    call(model, cache, ids)
    marked = [t for t, token in enumerate(ids[0].tolist()) if token in KINDS["special_ids"]]
    assert kept_of(cache, 0, head=0) == marked


def test_embeddings_are_refused():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    cache = CompressedCache(model, FastGen(0.8, **KINDS))
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(InvalidArgumentError, match=r"inputs_embeds: .*looks at tokens"):
        model.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 0


def test_without_a_tokenizer_there_is_no_cache():
    with pytest.raises(InvalidArgumentError, match=r"FastGen\(.*with_tokenizer\(tokenizer\)"):
        CompressedCache(tiny_model("llama"), FastGen())


# Special tokens and punctuation.


def test_the_demo_tokenizers_tokens(demo):
    policy = FastGen(0.9).with_tokenizer(demo.tokenizer)
    texts = {i: demo.tokenizer.decode([i]) for i in policy.punctuation_ids}
    assert {".", " .", "?", ":", " (", ").", "—", "..."} <= set(texts.values())
    assert not any(any(c.isalnum() for c in text) for text in texts.values())
    markers = demo.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<file_sep>"])
    assert set(markers) <= set(policy.special_ids)
    assert not set(policy.special_ids) & set(policy.punctuation_ids)
    assert policy.recovery == 0.9
    given = replace(policy, special_ids=(7,))
    assert given.with_tokenizer(demo.tokenizer) == given
    assert json.loads(json.dumps(policy.describe()))["special_ids"] == 17
    assert FastGen().describe()["special_ids"] is None


def test_variants_with_a_space_and_single_bytes_are_punctuation():
    vocabulary = ["<unk>", "<s>", "▁.", ".", "<0x2E>", "<0xE2>", "▁word", "word", "▁", "!?", "$"]
    own = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", unk_token="<unk>")
    assert special_tokens(tokenizer) == (0, 1)
    assert punctuation_tokens(tokenizer) == (2, 3, 4, 9)


def test_a_marker_of_several_tokens_is_found_where_they_follow_each_other():
    ids = torch.tensor([[7, 8, 9, 1, 7, 8], [7, 9, 7, 8, 9, 9]])
    marks = [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]]
    assert found(ids, (1, (7, 8, 9))).int().tolist() == marks
    assert found(ids[:, :2], (1, (7, 8, 9))).int().tolist() == [[0, 0], [0, 0]]
    assert not found(ids, ()).any()
    overlapping = found(torch.tensor([[5, 5, 5]]), ((5, 5),))
    assert overlapping.all()


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"recovery": 0}, InvalidArgumentError, r"recovery: .*\(0, 1\], got 0"),
        ({"recovery": 1.01}, InvalidArgumentError, r"recovery: .*\(0, 1\], got 1.01"),
        ({"recovery": "0.9"}, InvalidTypeError, "recovery: expected a number"),
        ({"local_ratio": 0}, InvalidArgumentError, "local_ratio: expected"),
        ({"frequent_ratio": 1.5}, InvalidArgumentError, "frequent_ratio: expected"),
        ({"special_ids": [1, 2]}, InvalidTypeError, r"special_ids: .*got \[1, 2\] of type list"),
        ({"special_ids": (1, "2")}, InvalidTypeError, "special_ids: .*got '2' among"),
        ({"special_ids": ((),)}, InvalidTypeError, r"special_ids: .*got \(\) among"),
        ({"punctuation_ids": (1, -2)}, InvalidArgumentError, "punctuation_ids: .*got -2"),
        ({"punctuation_ids": "."}, InvalidTypeError, "punctuation_ids: .*of type str"),
    ],
    ids=str,
)
def test_bad_parameters_are_refused_in_one_line(parameters, error, message):
    with pytest.raises(error, match=message) as caught:
        FastGen(**parameters)
    assert "\n" not in str(caught.value)
