"""Token ids that are compared from their beginning, by digests; no vLLM is needed here."""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

BLOCK = 256
"""Tokens between two digests: 16 bytes for each KiB of ids."""


@dataclass(frozen=True, eq=False)
class DigestedTokens:
    """Token ids, and a digest of every prefix of them that consists of whole blocks.

    Two of them are compared in a time that hardly depends on their length, so that a prompt can be
    compared with many histories.
    """

    ids: NDArray[np.int32]
    digests: Sequence[bytes]

    @classmethod
    def of(cls, ids: Sequence[int] | NDArray[np.int32]) -> Self:
        """Digest a copy of these ids, in a time linear in their number."""
        copied = np.array(ids, dtype=np.int32)
        digest, digests = hashlib.blake2b(digest_size=16), []
        for end in range(BLOCK, len(copied) + 1, BLOCK):
            digest.update(copied[end - BLOCK : end].data)
            digests.append(digest.digest())  # of all so far; the digest can be continued
        return cls(copied, digests)

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, tokens: int) -> Self:
        """Return the first `tokens` of them."""
        return type(self)(self.ids[:tokens], self.digests[: tokens // BLOCK])

    def common_tokens(self, other: "DigestedTokens") -> int:
        """Count the first tokens that are the same in both.

        Equal digests are taken for equal tokens; `begins_like` compares the tokens themselves.
        """
        most = min(len(self.digests), len(other.digests))
        blocks = bisect_left(range(most), True, key=lambda n: self.digests[n] != other.digests[n])
        behind = slice(blocks * BLOCK, (blocks + 1) * BLOCK)
        own, others = self.ids[behind], other.ids[behind]
        length = min(len(own), len(others))
        differ = np.flatnonzero(own[:length] != others[:length])
        return blocks * BLOCK + (int(differ[0]) if len(differ) else length)

    def begins_like(self, other: "DigestedTokens", tokens: int) -> bool:
        """Whether the first `tokens` are the same in both, compared one by one."""
        return np.array_equal(self.ids[:tokens], other.ids[:tokens])
