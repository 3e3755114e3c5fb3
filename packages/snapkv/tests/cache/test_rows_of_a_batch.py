"""Turns of a batch whose prompts differ in length: each row is read and compressed as alone."""

import pytest
import torch

from snapkv import (
    AdaKV,
    AutoBudget,
    CacheMismatchError,
    CompressedCache,
    SnapKV,
)
from tests.families import random_ids, tiny_model
from tests.methods import METHODS

PICK = {"window_size": 8, "kernel_size": 5}
READ_ONCE = {
    name
    for name, policy in METHODS.items()
    if policy.reads_context or "queries" in policy.needs or name == "random"
}
"""They take no later turns; and rows of one batch draw differently."""
STATIC = {"storage": "static", "room_tokens": 96}
CASES = {
    **{name: (policy, {}) for name, policy in METHODS.items() if name not in READ_ONCE},
    **{
        f"{name}, {'-'.join(map(str, options.values()))}": (METHODS[name], options)
        for options, names in (
            (STATIC, ["snapkv", "keydiff"]),
            ({"turns": "compress"}, ["snapkv", "criticalkv", "lagkv", "snapkv by query head"]),
            ({"recall": "host"}, ["snapkv", "adakv", "criticalkv", "keydiff"]),
        )
        for name in names
    },
}


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
        for piece in [*ids.split(pieces, dim=1), *answer.split(1, dim=1)]:
            self.read(piece)


KEPT_WHOLE = {
    "snapkv": METHODS["snapkv"],
    "adakv": METHODS["adakv"],
    "pyramidkv": METHODS["pyramidkv"],
    "adakv-auto": AdaKV(SnapKV(AutoBudget(lost_vote=0.012, least=4), **PICK)),
    "snapkv-auto": SnapKV(AutoBudget(lost_vote=0.016, least=4), **PICK),
}


@pytest.mark.parametrize("name", KEPT_WHOLE)
def test_a_turn_behind_a_row_that_has_kept_everything_is_refused(name):
    """Alone that row would be compressed at the turn's end, and the others not."""
    prompt = random_ids(2, 60, 1)
    prompt[0] = prompt[0, 0]
    rows = Rows(KEPT_WHOLE[name], {}, [40, 0] if name in METHODS else [0, 0])
    rows.turn(prompt, 60, random_ids(2, 2, 2))
    kept = [rows.cache.kept_positions(layer) for layer in rows.cache.compressed_layers]
    with pytest.raises(CacheMismatchError, match=r"got 1 of 2 rows that have kept .*; give each"):
        rows.cache.expect_prompt(70)
    rows.read(random_ids(2, 1, 3))  # an answer goes on
    for layer, before in zip(rows.cache.compressed_layers, kept, strict=True):
        assert torch.equal(rows.cache.kept_positions(layer)[..., :-1], before)
