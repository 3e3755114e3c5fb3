"""Histories of sessions: the tokens they stand for, compared by digests, and which of them go.

No vLLM is needed here.
"""

import hashlib
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from snapkv.policies.spans import Spans
from snapkv_vllm.admission.spans import RequestSpans

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
    def from_ids(cls, ids: Sequence[int] | NDArray[np.int32]) -> Self:
        """Digest a copy of these ids, in a time linear in their number."""
        copied = np.array(ids, dtype=np.int32)
        digest, digests = hashlib.blake2b(digest_size=16), []
        for end in range(BLOCK, len(copied) + 1, BLOCK):
            digest.update(copied[end - BLOCK : end].data)
            digests.append(digest.digest())  # of all so far; the digest can be continued
        return cls(copied, digests)

    def __len__(self) -> int:
        return len(self.ids)

    def truncate(self, tokens: int) -> Self:
        """Return the first `tokens` of them."""
        return type(self)(self.ids[:tokens], self.digests[: tokens // BLOCK])

    def count_common_tokens(self, other: "DigestedTokens") -> int:
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

    def has_same_prefix(self, other: "DigestedTokens", tokens: int) -> bool:
        """Whether the first `tokens` are the same in both, compared one by one."""
        return np.array_equal(self.ids[:tokens], other.ids[:tokens])


# Histories.

_NONE = Spans(())

Owner = tuple[str, str, str]
"""Whose a history is: the session, the adapter that has read it, and the salt of its cache."""


@dataclass(frozen=True, kw_only=True)
class CompressedPrefix:
    """What is known of a history up to where it was compressed last.

    Attributes:
        tokens: how many were seen then; 0 where it never was. What came after them is whole.
        kept_tokens: of those, per KV head.
        drop: what its request wanted gone.
        whole: what it wanted to stay, see `ServingSettings.whole_of`.
    """

    tokens: int = 0
    kept_tokens: int = 0
    drop: Spans = _NONE
    protected: Spans = _NONE

    @property
    def dropped_tokens(self) -> int:
        return self.tokens - self.kept_tokens

    def remaining_edits(self, asked: RequestSpans, whole: Spans) -> RequestSpans | None:
        """Of what a request says of spans what is still to be done; None where that is too late.

        What was dropped must be dropped, and what is to go or to stay now must be there whole.
        """
        if self.drop.without(asked.drop).parts or asked.compress:
            return None
        left, late = asked.drop.without(self.drop), Spans(((0, self.tokens),))
        for named in (left, whole):
            if named.overlap(late).without(self.protected).parts:
                return None
        return RequestSpans(drop=left, protect=asked.protect)


@dataclass(kw_only=True, eq=False)
class History:
    """Tokens that were seen, and the blocks that hold what is kept of them."""

    owner: Owner
    prompt: bytes  # a digest of its request's, which is the same when a turn is tried again
    tokens: DigestedTokens
    compressed: CompressedPrefix
    blocks: Sequence[list[Any]] = ()  # of every KV cache group
    requests: set[str] = field(default_factory=set)  # that begin with it and have not ended
    last_used: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def tenant(self) -> str:
        """Whose the session is; of a server that keeps keys apart its key, hashed."""
        return self.owner[0].partition("/")[0]

    @property
    def first_block(self) -> int:
        block: int = self.blocks[0][0].block_id
        return block

    @property
    def held_tokens(self) -> int:
        return len(self.tokens) - self.compressed.dropped_tokens

    def block_count(self, sizes: Sequence[int]) -> int:
        """How many it takes in groups of such blocks, those among them that others hold, too."""
        return sum(-(-self.held_tokens // size) for size in sizes)

    def usable_tokens(self, same: int, block_tokens: int) -> int:
        """Return how many first tokens a request can take from its blocks; 0 for none.

        In full blocks if there are some after what was compressed. Else no other request may begin
        with it, and what it held after those tokens is written over.

        Args:
            same: the first tokens that it has in common with the request's prompt. The result does
                not fall when these are more.
            block_tokens: tokens in a block.
        """
        at = self.compressed
        if same < max(1, at.tokens):
            return 0
        dropped = at.dropped_tokens
        full = (same - dropped) // block_tokens * block_tokens + dropped
        if full >= at.tokens:
            return full if full > dropped else 0
        return 0 if self.requests else same


# Who gives room back.


class _Owned(Protocol):
    @property
    def tenant(self) -> str: ...


Item = TypeVar("Item", bound=_Owned)


def choose_evictions(
    idle: Sequence[Item], taken: Counter[str], most: int, size_of: Callable[[Item], int]
) -> tuple[list[Item], int]:
    """Which of the idle ones go, so that what is taken fits: of the tenant that has most.

    A tenant's share is an equal part for each who has any. It may take what others leave; what is
    within another's share stays.

    Args:
        idle: the least recently used first.
        taken: by tenant, with what is to come.
        most: that all of them may take together.
        size_of: what one of the idle takes.

    Returns:
        Them, and how much is too much even then, 0 for nothing.
    """
    share, taken, idle, found = most / len(taken), Counter(taken), list(idle), list[Item]()
    while taken.total() > most:
        beyond = [one for one in idle if taken[one.tenant] > share]
        if not beyond:
            break
        found.append(max(beyond, key=lambda one: taken[one.tenant]))  # of equals the first
        idle.remove(found[-1])
        taken[found[-1].tenant] -= size_of(found[-1])
    return found, max(0, taken.total() - most)
