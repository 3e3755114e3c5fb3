"""Turns of a batch whose prompts differ in length: each row is read and compressed as alone."""

from dataclasses import replace

import pytest
import torch

from snapkv import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    AutoBudget,
    CompressedCache,
    CriticalKV,
    ExpectedAttention,
    FastGen,
    FullCache,
    KeyDiff,
    LagKV,
    PromptThenDecode,
    PyramidKV,
    Scissorhands,
    ScoreThreshold,
    SnapKV,
    StreamingLLM,
)
from tests.families import random_ids, tiny_model
from tests.policies.test_evicting import DUO

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
PICK = {"window_size": 8, "kernel_size": 5}
SNAPKV = SnapKV(40, **PICK)
METHODS = {
    "full": FullCache(),
    "snapkv": SNAPKV,
    "snapkv-ratio": SnapKV(keep_ratio=0.4, **PICK),
    "snapkv-auto": SnapKV("auto", **PICK),
    "snapkv-per-query-head": replace(SNAPKV, group_reduce="none"),
    "pyramidkv": PyramidKV(40, **PICK),
    "adakv": AdaKV(SNAPKV),
    "adakv-ratio": AdaKV(SnapKV(keep_ratio=0.4, **PICK)),
    "adakv-auto": AdaKV(SnapKV("auto", **PICK)),
    "criticalkv": CriticalKV(SNAPKV),
    "adakv-criticalkv": AdaKV(CriticalKV(SNAPKV)),
    "score-threshold": ScoreThreshold(SNAPKV, at_least=0.016),
    "expected-attention": ExpectedAttention(40, window_size=8),
    "keydiff": KeyDiff(40, window_size=8),
    "lagkv": LagKV(40, window_size=8, lag_size=9),
    "h2o": H2O(40),
    "tova": TOVA(40),
    "streaming-llm": StreamingLLM(40),
    "streaming-llm-original": StreamingLLM(40, positions="original"),
    "scissorhands": Scissorhands(40, history=24, recent=8),
    "scissorhands-slots": Scissorhands(40, history=6, recent=8, drop=3, threshold="slots"),
    "r-kv": RKV(40, evict_every=5),
    "fastgen": FastGen(0.8, special_ids=(3, 4), punctuation_ids=(5, 6, 7)),
    "duo-attention": replace(DUO, recent_tokens=24),
    "snapkv-then-tova": PromptThenDecode(prompt=SNAPKV, decode=TOVA(60)),
}
BUDGETED = ("snapkv", "criticalkv", "keydiff", "lagkv", "snapkv-per-query-head")
PRODUCTS = [
    *((name, {}) for name in METHODS),
    *((name, {"storage": "static", "room_tokens": 96}) for name in BUDGETED[:3]),
    *((name, {"turns": "compress"}) for name in BUDGETED),
    *((name, {"recall": "host"}) for name in ("snapkv", "adakv", "criticalkv", "keydiff")),
    ("snapkv", {"recall": "host", "refresh_every": 3}),
]  # fmt: skip
CASES = [
    pytest.param(METHODS[name], options, id="-".join([name, *map(str, options.values())]))
    for name, options in PRODUCTS
]


class Rows:
    """Some rows of a conversation in one cache; every pass reads as many tokens of each."""

    def __init__(self, policy, options, pads):
        self.model = tiny_model("llama")
        self.cache = CompressedCache(self.model, policy, **options)
        self.pads = torch.tensor(pads)
        self.passes = []

    @torch.no_grad()
    def read(self, ids):
        self.cache.expect_tokens(ids)
        columns = torch.arange(self.cache.get_seq_length() + ids.shape[1])
        output = self.model(
            ids,
            past_key_values=self.cache,
            attention_mask=(columns >= self.pads[:, None]).long(),
            position_ids=(columns - self.pads[:, None]).clamp(min=0)[:, -ids.shape[1] :],
        )
        self.passes.append(output.logits)

    def turn(self, ids, pieces, answer):
        self.cache.expect_prompt(self.cache.get_seq_length() + ids.shape[1])
        for piece in ids.split(pieces, dim=1):
            self.read(piece)
        for token in answer.split(1, dim=1):
            self.read(token)


def require_same_tokens(found, expected):
    """One set per query head where some row was compressed so, one per KV head in rows that fit."""
    expected = expected.repeat_interleave(max(1, len(found) // len(expected)), dim=0)
    found = found.repeat_interleave(max(1, len(expected) // len(found)), dim=0)
    for head, own in zip(found, expected, strict=True):
        assert head[head >= 0].tolist() == own[own >= 0].tolist()


def require_as_alone(together, row, alone):
    for found, expected in zip(together.passes, alone.passes, strict=True):
        found = found[row : row + 1, found.shape[1] - expected.shape[1] :]
        torch.testing.assert_close(found, expected, **CLOSE)
    for layer in together.cache.compressed_layers:
        found = together.cache.kept_positions(layer)[row]
        require_same_tokens(found, alone.cache.kept_positions(layer)[0])


@pytest.mark.parametrize("prompts", [(70, 95, 52), (20, 90), (33, 33)], ids=str)
@pytest.mark.parametrize(("policy", "options"), CASES)
def test_each_row_is_as_alone(policy, options, prompts):
    """The last pass alone of a first prompt, a turn in pieces and one at once, with answers."""
    longest, rows = max(prompts), len(prompts)
    pads = [longest - tokens for tokens in prompts]
    turns = [
        (random_ids(rows, longest), longest, random_ids(rows, 4, 1)),
        (random_ids(rows, 14, 2), 11, random_ids(rows, 5, 3)),
        (random_ids(rows, 30, 4), 30, random_ids(rows, 2, 5)),
    ]
    together = Rows(policy, options, pads)
    for turn in turns:
        together.turn(*turn)
    for row, own in enumerate(pads):
        alone = Rows(policy, options, [0])
        for number, (ids, pieces, answer) in enumerate(turns):
            ids = ids[row : row + 1, own if number == 0 else 0 :]
            alone.turn(ids, pieces, answer[row : row + 1])
        require_as_alone(together, row, alone)


OF_OWN_BUDGETS = {
    "score-threshold": ScoreThreshold(SnapKV(500, **PICK), at_least=0.012),
    "adakv-auto": AdaKV(SnapKV(AutoBudget(lost_vote=0.012, least=4), **PICK)),
    "snapkv-auto": SnapKV(AutoBudget(lost_vote=0.016, least=4), **PICK),
}


@pytest.mark.parametrize("pads", [(0, 0), (3, 0)], ids=str)
@pytest.mark.parametrize("policy", OF_OWN_BUDGETS.values(), ids=OF_OWN_BUDGETS)
def test_a_row_that_has_kept_everything_chooses_at_its_next_turn(policy, pads):
    """Rows of one length may keep different numbers of tokens, and one of them all."""
    prompt = random_ids(2, 60, 1)
    prompt[0] = prompt[0, 0]
    turns = [(prompt, 60, random_ids(2, 2, 2)), (random_ids(2, 30, 3), 21, random_ids(2, 2, 4))]
    together = Rows(policy, {}, pads)
    together.turn(*turns[0])
    layers = together.cache.reading.layers
    assert any(layer.slots.kept is not None and len({*held_of(layer)}) > 1 for layer in layers)
    together.turn(*turns[1])
    for row, own in enumerate(pads):
        alone = Rows(policy, {}, [0])
        for number, (ids, pieces, answer) in enumerate(turns):
            ids = ids[row : row + 1, own if number == 0 else 0 :]
            alone.turn(ids, pieces, answer[row : row + 1])
        require_as_alone(together, row, alone)


def held_of(layer):
    """For each row whether every head holds every token of it."""
    held = (layer.stored_positions() >= 0).sum(dim=-1).amin(dim=-1)
    pads = 0 if layer.slots.pads is None else layer.slots.pads
    return (held == layer.seen_tokens - pads).tolist()
