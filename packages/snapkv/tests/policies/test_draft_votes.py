"""Votes of a drafted answer: by hand, against attention computed apart, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch

from snapkv import (
    TOVA,
    AdaKV,
    CacheMismatchError,
    CompressedCache,
    CriticalKV,
    DraftVotes,
    FullCache,
    InvalidArgumentError,
    KeyDiff,
    PromptThenDecode,
    PyramidKV,
    SnapKV,
)
from snapkv.hf.forward_context import Hook, hooked
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from tests.families import ONCE, call, random_ids, tiny_model

PROMPT, W, N = 90, 8, 4
VOTES = SnapKV(30, window_size=W, kernel_size=1)
POLICY = DraftVotes(VOTES, draft_tokens=N)


def test_a_draft_raises_what_the_window_did_not_look_at():
    """Of keys 0 to 4 the window looks at 1; the draft looks at 4, which so is the second best."""
    keys = torch.eye(6)[None, None]
    ask = (torch.eye(6)[1] * 20)[None, None, None]
    draft = (torch.eye(6)[4] * 10)[None, None, None]
    layer = PromptLayer(
        queries=ask, keys=keys, values=keys, score_options=ScoreOptions(scaling=1.0), layer_idx=0
    )
    policy = DraftVotes(SnapKV(3, window_size=1, kernel_size=1), draft_tokens=1)
    assert policy.select(layer).keep_indices.tolist() == [[[0, 1, 5]]]
    behind = torch.zeros(1, 1, 1, 6)
    drafted = replace(layer, draft=(draft, behind, behind))
    assert policy.select(drafted).keep_indices.tolist() == [[[1, 4, 5]]]


class Queries(Hook):
    def __init__(self):
        self.seen = {}

    def on_attention(self, asked, attended):
        self.seen.setdefault(asked.module.layer_idx, []).append(asked.query)


def kept_apart(model, ids):
    """The kept sets, from queries and keys of passes that know nothing of drafts."""
    whole, plain = (CompressedCache(model, policy) for policy in (FullCache(), VOTES))
    with hooked(hook := Queries()):
        call(model, whole, ids)
    logits = call(model, plain, ids)
    with hooked(drafts := Queries()):
        for _ in range(N):
            logits = call(model, plain, logits[:, -1:].argmax(-1))
    sets = []
    for depth, layer in enumerate(plain.compressed_layers):
        keys = whole.layers[layer].keys
        behind = plain.layers[layer].keys[:, :, -N:]
        window = hook.seen[layer][0][:, :, -W:]
        drafted = torch.cat(drafts.seen[layer], dim=2)
        both = torch.cat([keys, behind], dim=2)
        shares = shares_of(window, keys).maximum(shares_of(drafted, both)[..., : PROMPT - W])
        best = shares.topk(VOTES.budget - W, dim=-1).indices.sort().values
        tail = torch.arange(PROMPT - W, PROMPT).expand(*best.shape[:2], -1)
        sets.append((depth, torch.cat([best, tail], dim=-1)))
    return sets


def shares_of(queries, keys):
    """(B, Hkv, P): the attention to what is before the queries, mean of them and their group."""
    B, Hq, Q, D = queries.shape
    H, S = keys.shape[1], keys.shape[2]
    scores = queries @ keys.repeat_interleave(Hq // H, dim=1).mT * D**-0.5
    hidden = torch.ones(Q, S, dtype=torch.bool).triu(S - Q + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)[..., : S - Q]
    return weights.view(B, H, Hq // H, Q, -1).mean(dim=(2, 3))


@pytest.mark.parametrize("first", [0, 150])  # rotary attention knows differences alone
@pytest.mark.parametrize("plain_calls", [False, True])
def test_kept_sets_are_those_of_attention_computed_apart(plain_calls, first):
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    cache, places = CompressedCache(model, POLICY), first + torch.arange(PROMPT)[None]
    if plain_calls:
        cache.vote_by_draft(call(model, cache, ids, position_ids=places), position_ids=places)
    else:
        model.generate(
            ids,
            position_ids=places.expand(2, -1),
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=1,
            do_sample=False,
        )
    assert cache.get_seq_length() == PROMPT
    for layer, expected in kept_apart(model, ids):
        assert torch.equal(cache.kept_positions(layer), expected)


@pytest.mark.parametrize(("family", "implementation"), ONCE)
def test_rows_of_a_padded_batch_are_as_alone_in_every_family(family, implementation):
    model, ids = tiny_model(family, implementation), random_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    answers, kept = [], []
    for rows, start in ((slice(0, 2), 0), (slice(0, 1), 20), (slice(1, 2), 0)):
        cache = CompressedCache(model, POLICY)
        given = {"attention_mask": mask[rows, start:], "past_key_values": cache}
        made = model.generate(
            ids[rows, start:], max_new_tokens=6, do_sample=False, pad_token_id=0, **given
        )
        answers.append(made[:, -6:])
        kept.append([cache.kept_positions(layer) for layer in cache.compressed_layers])
    assert torch.equal(answers[0], torch.cat(answers[1:]))
    for together, *alone in zip(*kept, strict=True):
        for row, own in enumerate(alone):
            for found, expected in zip(together[row], own[0], strict=True):
                assert found[found >= 0].tolist() == expected[expected >= 0].tolist()


@pytest.mark.parametrize(
    "policy",
    [
        AdaKV(POLICY),
        CriticalKV(POLICY),
        DraftVotes(PyramidKV(30, window_size=W, kernel_size=1), draft_tokens=N),
        DraftVotes(SnapKV("auto", window_size=W)),
    ],
    ids=lambda policy: policy.name,
)
@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"recall": "host"}], ids=str)
def test_others_go_around_it_and_storages_hold_it(policy, options):
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    drafted, plain = (CompressedCache(model, each, **options) for each in (policy, VOTES))
    for cache in (drafted, plain):
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=3,
            do_sample=False,
        )
    assert drafted.get_seq_length() == plain.get_seq_length() == PROMPT + 2
    assert not drafted.reading.undecided


def test_what_would_go_on_without_the_draft_is_refused(tmp_path):
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    cache = CompressedCache(model, POLICY)
    logits = call(model, cache, ids)
    for refused in (
        lambda: call(model, cache, random_ids(2, 1)),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.save(tmp_path / "one"),
        lambda: copy.copy(cache),
    ):
        with pytest.raises(CacheMismatchError, match=r"call cache\.vote_by_draft\(logits\)"):
            refused()
    cache.vote_by_draft(logits)
    with pytest.raises(CacheMismatchError, match="logits: expected a prompt that has just been"):
        cache.vote_by_draft(logits)
    cache.save(tmp_path / "one")
    assert CompressedCache.load(tmp_path / "one", model).policy == POLICY


def test_what_has_no_votes_or_no_place_for_a_draft_is_refused():
    model = tiny_model("llama")
    for make, said in (
        (lambda: DraftVotes(KeyDiff(60)), "policy: expected a method whose window votes"),
        (lambda: DraftVotes(VOTES, draft_tokens=40), "budget: expected more than window_size=40"),
        (
            lambda: PromptThenDecode(prompt=POLICY, decode=TOVA(60)),
            "prompt: expected a method whose scores",
        ),
        (lambda: CompressedCache(model, POLICY, storage="static"), "storage: expected a policy"),
        (lambda: CompressedCache(model, POLICY, turns="compress"), "policy: expected one whose"),
        (lambda: CompressedCache(model, POLICY).require_drafts(), "policy: expected one whose"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            make()


def test_the_report_says_what_the_draft_took():
    """Of each layer the whole prompt, and queries, keys and values of what voted; float32."""
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    cache = CompressedCache(model, POLICY)
    logits = call(model, cache, ids)
    assert cache.report()["draft"] is None
    cache.vote_by_draft(logits)
    report, config = cache.report(), model.config
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    voted = 4 * 2 * N * heads * config.head_dim * config.num_hidden_layers
    assert report["draft"].pop("ms") > 0
    assert report["draft"] == {"tokens": N, "held_bytes": report.full_bytes + voted}
    assert str(cache.report()).splitlines()[-1].startswith(f"votes of a draft: {N} tokens, ")
    assert copy.copy(cache).report()["draft"] is not None
    cache.reset()
    assert cache.report()["draft"] is None
