"""Rows of a conversation, with pads in front."""

import torch

from snapkv import CompressedCache
from tests.families import tiny_model


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
