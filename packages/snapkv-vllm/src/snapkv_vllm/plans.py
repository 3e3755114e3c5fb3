"""When a request is compressed, by numbers of tokens alone; no vLLM is needed here.

A request that is preempted starts again, and others change how its prompt is cut into steps. What
it keeps must not depend on either, so a plan looks at nothing but how many tokens were computed and
how many of them are held, and steps end where the plan says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from snapkv.policies import EvictingPolicy, Policy
from snapkv_vllm.choices import (
    Choice,
    EndOfPrompt,
    UnderCap,
    WhileGenerating,
    queries_of,
)
from snapkv_vllm.methods import kept_tokens, parts_heads
from snapkv_vllm.orders import Ahead, Order, room_tokens


class RequestPlan(Protocol):
    """When a request is compressed, as the scheduler asks and the blocks do."""

    def step_tokens(self, seen_tokens: int, held_tokens: int, offered_tokens: int) -> int:
        """How many tokens a step computes, so that none runs past the next compression.

        Args:
            seen_tokens: computed before the step.
            held_tokens: how many are held.
            offered_tokens: how many there is room for.

        Returns:
            Those read ahead are among them.
        """

    def order(
        self, seen_tokens: int, held_tokens: int, step_tokens: int, prompt_ids: Sequence[int]
    ) -> Order | None:
        """What the workers do in a step; None where there is nothing to do beside it.

        Args:
            seen_tokens: computed before the step.
            held_tokens: how many are held.
            step_tokens: what `step_tokens` allowed.
            prompt_ids: the ids of the whole prompt.
        """

    def room(self, seen_tokens: int, held_tokens: int, step_tokens: int, block_tokens: int) -> int:
        """Tokens to count for what the first compression keeps within so many computed tokens.

        Args:
            seen_tokens: computed before them.
            held_tokens: how many are held.
            step_tokens: computed then.
            block_tokens: tokens in a block.

        Returns:
            0 where nothing is compressed.
        """

    @property
    def shared_tokens(self) -> int | None:
        """Tokens from the first on, whose keys and values are those of every request's; None: all.

        Behind them a request may have read tokens ahead, or have dropped what others would see.
        """

    @property
    def reusable_tokens(self) -> int | None:
        """How much of a cached prefix the request may reuse; None: all."""

    def most_held(self, tokens: int) -> int:
        """The most that the request holds at any time until it has seen that many tokens."""

    def spare_tokens(self, block_tokens: int) -> int:
        """What heads of different length leave empty in their last blocks, at most."""


@dataclass(frozen=True, kw_only=True)
class Cap:
    """Holds a prompt to a number of tokens while it is read, as `prefill.chunked` does.

    Attributes:
        most_tokens: held between two pieces.
        chunk_tokens: read between two compressions.
        looks_ahead: whether the prompt's last tokens vote on every piece; else the piece's own do.
            They cannot where layers of another kind read them too, which cannot forget them.
    """

    most_tokens: int
    chunk_tokens: int
    looks_ahead: bool


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Holds an answer to a number of tokens while it grows.

    Attributes:
        policy: evicts.
        most_tokens: of prompt and answer that are held when a token has been generated.
        evict_every: generated tokens between two evictions; so many are dropped at once.
        protect_first: first tokens that stay, of the prompt and, where it is shorter, the answer.
    """

    policy: EvictingPolicy
    most_tokens: int
    evict_every: int
    protect_first: int = 0


@dataclass(frozen=True, kw_only=True)
class Compression:
    """One compression of a request.

    Attributes:
        at: how many tokens are computed when it happens.
        kept_tokens: how many stay.
        choice: what chooses them.
        ahead_tokens: how many of the prompt's last tokens are read with the step that reaches `at`.
    """

    at: int
    kept_tokens: int
    choice: Choice
    ahead_tokens: int = 0

    @property
    def needed_tokens(self) -> int:
        """How many of the tokens before `at` must be computed for it, cached or not."""
        return 1 if self.ahead_tokens else max(1, self.choice.query_tokens)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When a request is compressed that has a prompt of its own, and to how much.

    Attributes:
        prompt_tokens: length of the prompt.
        policy: compresses the prompt; None leaves it whole.
        cap: holds it to a number of tokens while it is read; or None.
        growth: does so with the answer; or None.
    """

    prompt_tokens: int
    policy: Policy | None = None
    cap: Cap | None = None
    growth: Growth | None = None

    def next(self, seen_tokens: int, held_tokens: int) -> Compression | None:
        """The first compression of a request that has seen so many tokens, and holds so many."""
        compression = None
        if seen_tokens < self.prompt_tokens:
            compression = self._under_cap(seen_tokens, held_tokens) or self._at_the_end(
                held_tokens + self.prompt_tokens - seen_tokens
            )
        return compression or self._while_generating(seen_tokens, held_tokens)

    def _under_cap(self, seen: int, held: int) -> Compression | None:
        if self.cap is None or self.policy is None:
            return None
        over = seen - held + self.cap.most_tokens + 1  # the first token that is too many
        at = -(-over // self.cap.chunk_tokens) * self.cap.chunk_tokens
        window = self.policy.query_tokens
        if at + window >= self.prompt_tokens:  # what is left is read with the last chunk
            return None
        ahead = window if self.cap.looks_ahead else 0
        return Compression(
            at=at,
            kept_tokens=self.cap.most_tokens,
            choice=UnderCap(self.policy, ahead),
            ahead_tokens=ahead,
        )

    def _at_the_end(self, held_then: int) -> Compression | None:
        if self.policy is None or (kept := kept_tokens(self.policy, held_then)) == held_then:
            return None
        return Compression(at=self.prompt_tokens, kept_tokens=kept, choice=EndOfPrompt(self.policy))

    def _while_generating(self, seen: int, held: int) -> Compression | None:
        growth = self.growth
        if growth is None:
            return None
        at = max(self.prompt_tokens, seen - held + growth.most_tokens - 1) + 1
        queries = min(queries_of(growth.policy), at - self.prompt_tokens)
        return Compression(
            at=at,
            kept_tokens=growth.most_tokens - growth.evict_every,
            choice=WhileGenerating(growth.policy, queries, growth.protect_first),
        )

    def step_tokens(self, seen_tokens: int, held_tokens: int, offered_tokens: int) -> int:
        """See `RequestPlan`."""
        compression = self.next(seen_tokens, held_tokens)
        if compression is None:
            return offered_tokens
        rest = compression.at - seen_tokens
        whole = rest + compression.ahead_tokens
        if offered_tokens >= whole:
            return whole
        return min(offered_tokens, rest - 1 if compression.ahead_tokens else rest)

    def order(
        self, seen_tokens: int, held_tokens: int, step_tokens: int, prompt_ids: Sequence[int]
    ) -> Order | None:
        """See `RequestPlan`."""
        compression = self.next(seen_tokens, held_tokens)
        if compression is None:
            return None
        ahead = compression.ahead_tokens
        computed = seen_tokens + step_tokens
        ends = computed == compression.at + ahead
        if ahead:
            queries = ahead if ends else 0
        else:
            first = max(seen_tokens, compression.at - compression.choice.query_tokens)
            queries = max(0, computed - first)
        if not (queries or ends):
            return None
        return Order(
            choice=compression.choice,
            query_tokens=queries,
            seen_tokens=compression.at if ends else computed,
            held_tokens=held_tokens + step_tokens,
            ends=ends,
            kept_tokens=compression.kept_tokens,
            ahead=_last(prompt_ids, ahead) if ends and ahead else None,
            steps_back=ahead if ends else 0,
        )

    def room(self, seen_tokens: int, held_tokens: int, step_tokens: int, block_tokens: int) -> int:
        """See `RequestPlan`."""
        compression = self.next(seen_tokens, held_tokens)
        if compression is None:
            return 0
        rest = compression.at + compression.ahead_tokens - seen_tokens
        if step_tokens < rest:
            return 0
        kept, held = compression.kept_tokens, held_tokens + rest
        return room_tokens(compression.choice, kept, held, block_tokens)

    @property
    def shared_tokens(self) -> int | None:
        """See `RequestPlan`."""
        first = self.next(0, 0)
        return None if first is None else first.at

    @property
    def reusable_tokens(self) -> int | None:
        """See `RequestPlan`."""
        first = self.next(0, 0)
        return None if first is None else max(0, first.at - first.needed_tokens)

    def most_held(self, tokens: int) -> int:
        """See `RequestPlan`."""
        read = min(tokens, self.prompt_tokens)
        if self.cap is not None and self.policy is not None:
            most = self.cap.most_tokens + self.cap.chunk_tokens + self.policy.query_tokens
            read = min(read, most)
        if tokens <= self.prompt_tokens:
            return read
        kept = self.prompt_tokens if self.policy is None else kept_tokens(self.policy, read)
        grown = kept + tokens - self.prompt_tokens
        if self.growth is not None:
            grown = min(grown, max(self.growth.most_tokens, kept + 1))
        return max(read, grown)

    def spare_tokens(self, block_tokens: int) -> int:
        """See `RequestPlan`."""
        apart = self.policy is not None and parts_heads(self.policy)
        return block_tokens - 1 if apart else 0


def _last(prompt_ids: Sequence[int], tokens: int) -> Ahead:
    first = len(prompt_ids) - tokens
    return Ahead(first_position=first, token_ids=tuple(prompt_ids[first:]))
