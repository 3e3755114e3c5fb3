"""Heads for tests: some draft at random, and some know the text."""

import torch

from snapkv_lab.medusa import MedusaHeads
from snapkv_lab.medusa.tree import HEAD_RANKS
from tests.families import VOCABULARY


def random_heads(model, num_heads=3, seed=0, scale=0.02):
    """Return heads that draft almost as the model does for the next token."""
    generator = torch.Generator().manual_seed(seed)
    heads = MedusaHeads.untrained(model, num_heads)
    heads.weights.data.normal_(generator=generator).mul_(scale)
    return heads


class KnowingHeads(MedusaHeads):
    """Heads that know the text: the right tokens have changing ranks, with wrong ones between."""

    @classmethod
    def of(cls, model, cache, text, num_heads=3, seed=0):
        heads = cls.untrained(model, num_heads)
        heads._cache, heads._text = cache, text.flatten().tolist()
        heads._generator = torch.Generator().manual_seed(seed)
        return heads

    def guesses(self, hidden):
        shape = (self.num_heads, HEAD_RANKS)
        guesses = torch.randint(3, VOCABULARY, shape, generator=self._generator)
        ranks = torch.randint(0, 3, (self.num_heads,), generator=self._generator)
        seen = self._cache.get_seq_length()
        for head in range(self.num_heads):
            place = seen + 1 + head
            if place < len(self._text):
                guesses[head, ranks[head]] = self._text[place]
        return guesses
