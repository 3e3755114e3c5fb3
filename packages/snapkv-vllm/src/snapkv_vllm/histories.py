"""Histories of sessions: their tokens, which are compared by digests, and the choice of those to
evict.

This module does not import vLLM.
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
"""The number of tokens between two digests, which take 16 bytes for each KiB of ids."""


@dataclass(frozen=True, eq=False)
class DigestedTokens:
    """Token ids with a digest of each prefix that consists of whole blocks of `BLOCK` tokens.

    The time to compare two of them hardly depends on their length, so a prompt can be compared with
    many histories.
    """

    ids: NDArray[np.int32]
    digests: Sequence[bytes]

    @classmethod
    def from_ids(cls, ids: Sequence[int] | NDArray[np.int32]) -> Self:
        """Copy token ids as int32, and compute the digest of each prefix that consists of whole
        blocks.
        """
        copied = np.array(ids, dtype=np.int32)
        digest, digests = hashlib.blake2b(digest_size=16), []
        for end in range(BLOCK, len(copied) + 1, BLOCK):
            digest.update(copied[end - BLOCK : end].data)
            digests.append(digest.digest())  # of all tokens so far
        return cls(copied, digests)

    def __len__(self) -> int:
        return len(self.ids)

    def truncate(self, tokens: int) -> Self:
        """Return the first `tokens` tokens with their digests. The ids are a view."""
        return type(self)(self.ids[:tokens], self.digests[: tokens // BLOCK])

    def count_common_tokens(self, other: "DigestedTokens") -> int:
        """Count the tokens at the beginning that are the same in both objects.

        Equal digests are taken for equal tokens, so the result may be too large if two digests
        collide; `has_same_prefix` compares the tokens themselves.
        """
        most = min(len(self.digests), len(other.digests))
        blocks = bisect_left(range(most), True, key=lambda n: self.digests[n] != other.digests[n])
        block = slice(blocks * BLOCK, (blocks + 1) * BLOCK)
        own, others = self.ids[block], other.ids[block]
        length = min(len(own), len(others))
        differ = np.flatnonzero(own[:length] != others[:length])
        return blocks * BLOCK + (int(differ[0]) if len(differ) else length)

    def has_same_prefix(self, other: "DigestedTokens", tokens: int) -> bool:
        """Whether the first `tokens` tokens are the same in both objects, compared one by one. If
        one of them has fewer tokens, both must have the same number.
        """
        return np.array_equal(self.ids[:tokens], other.ids[:tokens])


# Histories.

_NONE = Spans(())

Owner = tuple[str, str, str]
"""The owner of a history: its session, the LoRA adapter that has computed it, and its
cache salt.
"""


@dataclass(frozen=True, kw_only=True)
class CompressedPrefix:
    """The part of a history that has been compressed, and the spans that its requests have edited.

    Attributes:
        tokens: how many tokens were computed at the last compression; 0 if there was none. All
            later tokens are stored.
        kept_tokens: how many of them are stored per KV head.
        drop: the spans that were dropped.
        protected: the spans that were kept whatever the votes; see
            `ServingSettings.protected_spans_of`.
    """

    tokens: int = 0
    kept_tokens: int = 0
    drop: Spans = _NONE
    protected: Spans = _NONE

    @property
    def dropped_tokens(self) -> int:
        """How many tokens of this part are no longer stored."""
        return self.tokens - self.kept_tokens

    def remaining_edits(self, requested: RequestSpans, protected: Spans) -> RequestSpans | None:
        """Return the edits of spans that a new request asks for and that the history does not
        contain yet.

        Args:
            requested: the spans that the request drops, protects or compresses.
            protected: the spans that the request keeps whatever the votes.

        Returns:
            The edits. None if the request compresses spans, if it does not drop all that the
            history has dropped, or if it drops or keeps tokens of the compressed part that the
            history did not protect, because some of them may have been evicted.
        """
        if self.drop.without(requested.drop).parts or requested.compress:
            return None
        left, compressed = requested.drop.without(self.drop), Spans(((0, self.tokens),))
        for spans in (left, protected):
            if spans.overlap(compressed).without(self.protected).parts:
                return None
        return RequestSpans(drop=left, protect=requested.protect)


@dataclass(kw_only=True, eq=False)
class History:
    """A stored history: the tokens that a request has computed, and the blocks that store the kept
    ones.
    """

    owner: Owner
    prompt: bytes  # a digest of the prompt, which is the same if a request is sent again
    tokens: DigestedTokens
    compressed: CompressedPrefix
    blocks: Sequence[list[Any]] = ()  # for each KV cache group
    requests: set[str] = field(default_factory=set)  # running requests that begin with it
    last_used: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def tenant(self) -> str:
        """The tenant of the session: the first 32 digits of the hash of its API key, or "" on a
        server without keys.
        """
        return self.owner[0].partition("/")[0]

    @property
    def first_block(self) -> int:
        """The number of the first block of the history. Workers use it to identify the history,
        which must have its blocks.
        """
        block: int = self.blocks[0][0].block_id
        return block

    @property
    def held_tokens(self) -> int:
        """How many tokens of the history are stored per KV head."""
        return len(self.tokens) - self.compressed.dropped_tokens

    def block_count(self, sizes: Sequence[int]) -> int:
        """Return how many blocks the history takes in all KV cache groups together, if they have
        these block sizes. Blocks that it shares with other histories are counted as well.
        """
        return sum(-(-self.held_tokens // size) for size in sizes)

    def usable_tokens(self, same: int, block_tokens: int) -> int:
        """Return how many tokens at its beginning a request can take from the blocks of this
        history; 0 if it cannot use the history.

        If a block ends at or after the last compression and within the common tokens, these are the
        tokens up to the last such end. Otherwise the request takes all common tokens, continues in
        the last block and overwrites what follows; so the result is 0 while another request uses
        the history.

        Args:
            same: how many first tokens the history has in common with the prompt. A larger number
                never gives a smaller result.
            block_tokens: the size of a block.
        """
        prefix = self.compressed
        if same < max(1, prefix.tokens):
            return 0
        dropped = prefix.dropped_tokens
        full = (same - dropped) // block_tokens * block_tokens + dropped
        if full >= prefix.tokens:
            return full if full > dropped else 0
        return 0 if self.requests else same


# Evictions.


class _Owned(Protocol):
    @property
    def tenant(self) -> str: ...


Item = TypeVar("Item", bound=_Owned)


def choose_evictions(
    idle: Sequence[Item], taken: Counter[str], most: int, size_of: Callable[[Item], int]
) -> tuple[list[Item], int]:
    """Choose which idle items are evicted, always the least recently used one of the tenant that
    takes most.

    Every tenant that takes anything has an equal share of `most`, and may also use what others
    leave free. No item is chosen of a tenant that takes at most its share.

    Args:
        idle: the items that may be evicted, least recently used first.
        taken: how much each tenant takes, including the new item; it must not be empty, and is not
            changed.
        most: how much all tenants together may take.
        size_of: how much one item takes.

    Returns:
        The items to evict, and by how much `most` is still exceeded without them, or 0.
    """
    share, taken, idle, found = most / len(taken), Counter(taken), list(idle), list[Item]()
    while taken.total() > most:
        beyond = [one for one in idle if taken[one.tenant] > share]
        if not beyond:
            break
        # `max` returns the first, which is the least recently used one of that tenant.
        found.append(max(beyond, key=lambda one: taken[one.tenant]))
        idle.remove(found[-1])
        taken[found[-1].tenant] -= size_of(found[-1])
    return found, max(0, taken.total() - most)
