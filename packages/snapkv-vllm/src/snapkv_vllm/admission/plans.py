"""When a request is compressed, by what, and what workers are told of it; no vLLM is needed here.

A request that is preempted starts again, and others change how its prompt is cut into steps. What
it keeps must not depend on either, so a plan looks at nothing but how many tokens were computed and
how many of them are held, and steps end where the plan says.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from snapkv.policies import DecodeStep, EvictingPolicy, Policy, PromptLayer
from snapkv.policies.states import LayerStates
from snapkv_vllm.admission.methods import WithSpans, count_kept_tokens


def count_eviction_queries(policy: EvictingPolicy) -> int:
    """How many of the last queries a method wants to see when it evicts."""
    return policy.history_tokens or policy.query_tokens


@dataclass(frozen=True)
class Selector:
    """Chooses by what the workers have put aside and by the keys that a request holds."""

    stage: ClassVar[str]  # when it does, in a word for the metrics

    policy: Policy
    protect_first: int = field(default=0, kw_only=True)  # first tokens that stay

    @property
    def per_head_budget(self) -> bool:
        """Whether the heads of a layer keep different numbers of tokens."""
        return self.policy.per_head_budget

    @property
    def query_tokens(self) -> int:
        """How many of the last queries it wants to see."""
        return self.policy.query_tokens

    def select(self, layer: PromptLayer) -> Tensor | None:
        """Which of the held tokens stay.

        Returns:
            (layers, H or 1, K) int64, ascending, after a leading run of -1 where heads keep
            different numbers; None where the method keeps everything.
        """
        selection = self.policy.select(replace(layer, protected=self.protected_mask(layer)))
        return None if selection is None else selection.keep_indices

    def protected_mask(self, layer: LayerStates) -> Tensor | None:
        """Slots of the first tokens that stay, which are a layer's first: (layers, 1, S) bool."""
        if not self.protect_first:
            return None
        slots = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        return (slots < self.protect_first).expand(layer.keys.shape[0], 1, -1)


class PromptSelector(Selector):
    """What the method keeps of a prompt that has been read."""

    stage = "prompt"


class TurnSelector(PromptSelector):
    """What stays at the end of a prompt whose beginning may have been compressed before."""

    def select_with_positions(self, layer: PromptLayer, positions: Tensor | None) -> Tensor | None:
        """As `keep`, where slots hold the tokens at (layers, 1 or H, S) positions."""
        policy = self.policy
        if positions is None or not isinstance(policy, WithSpans):
            return self.select(layer)
        return policy.select_with_positions(layer, positions).keep_indices


@dataclass(frozen=True)
class AnswerSelector(Selector):
    """What stays while an answer grows."""

    stage = "generating"
    per_head_budget = False

    policy: EvictingPolicy  # is shown no columns, as the methods that are served need none
    # how many of the last ones it sees, fewer than it wants where the answer has just begun
    queries: int

    @property
    def query_tokens(self) -> int:
        return self.queries

    def select(self, layer: PromptLayer) -> Tensor | None:
        step = DecodeStep(
            queries=layer.queries,
            keys=layer.keys,
            score_options=layer.score_options,
            layer_idx=layer.layer_idx,
            depth=layer.depth,
            num_layers=layer.num_layers,
            protected=self.protected_mask(layer),
            columns=torch.empty(*layer.keys.shape[:3], dtype=torch.int64, device="meta"),
            seen_tokens=layer.keys.shape[2],
        )
        return self.policy.evict(step).keep_indices


# What the scheduler tells the workers.


@dataclass(frozen=True, kw_only=True)
class Move:
    """Where the blocks of a request lie before and after it is compressed."""

    group: int  # index of vLLM's KV cache group
    sources: tuple[int, ...]  # the blocks that hold its tokens
    targets: tuple[int, ...]  # the blocks that hold the kept tokens; some of the sources, or others


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the workers do with one request in the step that carries the order."""

    selector: Selector
    query_tokens: int  # of the step's last ones, whose queries are put aside for the choice
    seen_tokens: int  # that count as computed when the step is done
    held_tokens: int  # of which keys and values are cached then
    is_due: bool  # whether the choice is made after this step; what was put aside is then forgotten
    kept_tokens: int  # how many stay
    moves: tuple[Move, ...] = ()  # what happens to the blocks of each compressed KV cache group

    @property
    def per_head_budget(self) -> bool:
        """Whether the heads of a layer keep different numbers of tokens."""
        return self.selector.per_head_budget

    def reserved_tokens(self, block_tokens: int) -> int:
        return reserved_tokens(self.selector, self.kept_tokens, self.held_tokens, block_tokens)

    @property
    def dropped_tokens(self) -> int:
        """Of all tokens seen, how many are held no more when the request has been compressed."""
        return self.seen_tokens - self.kept_tokens


def reserved_tokens(selector: Selector, kept: int, held: int, block_tokens: int) -> int:
    """Tokens to count for those that a choice keeps of what is held, in blocks of so many.

    The last page of a head may hold a single token, so where heads keep different numbers,
    `block_tokens` - 1 more are counted than the mean; but no head keeps more than was held.
    """
    if selector.per_head_budget:
        return min(kept + block_tokens - 1, held)
    return kept


# Plans.


@dataclass(frozen=True, kw_only=True)
class AnswerLimit:
    """Holds an answer to a number of tokens while it grows."""

    policy: EvictingPolicy  # evicts
    max_tokens: int  # of prompt and answer that are held when a token has been generated
    evict_every: int  # generated tokens between two evictions; so many are dropped at once


@dataclass(frozen=True, kw_only=True)
class Compression:
    """One compression of a request."""

    trigger_tokens: int  # how many tokens are computed when it happens
    kept_tokens: int
    selector: Selector


@dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """When a request is compressed, and to how much, as the scheduler asks and the blocks do."""

    selector_type: ClassVar[type[PromptSelector]] = PromptSelector

    prompt_tokens: int
    policy: Policy | None = None  # compresses the prompt; None leaves it whole
    protect_first: int = 0  # tokens that stay of prompt and answer, next to those of spans
    answer_limit: AnswerLimit | None = None

    def next_compression(self, seen_tokens: int, held_tokens: int) -> Compression | None:
        """The first compression of a request that has seen so many tokens, and holds so many."""
        compression = None
        if seen_tokens < self.prompt_tokens:
            compression = self._compression_of_prompt(
                held_tokens + self.prompt_tokens - seen_tokens
            )
        return compression or self._compression_of_answer(seen_tokens, held_tokens)

    def _compression_of_prompt(self, held_then: int) -> Compression | None:
        if self.policy is None or (kept := count_kept_tokens(self.policy, held_then)) == held_then:
            return None
        selector = self.selector_type(self.policy, protect_first=self.protect_first)
        return Compression(trigger_tokens=self.prompt_tokens, kept_tokens=kept, selector=selector)

    def _compression_of_answer(self, seen: int, held: int) -> Compression | None:
        if (answer_limit := self.answer_limit) is None:
            return None
        trigger_tokens = max(self.prompt_tokens, seen - held + answer_limit.max_tokens - 1) + 1
        queries = min(
            count_eviction_queries(answer_limit.policy), trigger_tokens - self.prompt_tokens
        )
        selector = AnswerSelector(answer_limit.policy, queries, protect_first=self.protect_first)
        kept = answer_limit.max_tokens - answer_limit.evict_every
        return Compression(trigger_tokens=trigger_tokens, kept_tokens=kept, selector=selector)

    def limit_step(self, seen_tokens: int, held_tokens: int, offered_tokens: int) -> int:
        """How many tokens a step computes, so that none runs past the next compression."""
        compression = self.next_compression(seen_tokens, held_tokens)
        if compression is None:
            return offered_tokens
        return min(offered_tokens, compression.trigger_tokens - seen_tokens)

    def make_order(self, seen_tokens: int, held_tokens: int, step_tokens: int) -> Order | None:
        """What the workers do in a step; None if there is nothing else to do."""
        compression = self.next_compression(seen_tokens, held_tokens)
        if compression is None:
            return None
        computed = seen_tokens + step_tokens
        first = max(seen_tokens, compression.trigger_tokens - compression.selector.query_tokens)
        queries, is_due = max(0, computed - first), computed == compression.trigger_tokens
        if not (queries or is_due):
            return None
        return Order(
            selector=compression.selector,
            query_tokens=queries,
            seen_tokens=computed,
            held_tokens=held_tokens + step_tokens,
            is_due=is_due,
            kept_tokens=compression.kept_tokens,
        )

    def tokens_to_reserve(
        self, seen_tokens: int, held_tokens: int, step_tokens: int, block_tokens: int
    ) -> int:
        """Tokens to count, in blocks of so many, for what the first compression of a step keeps.

        0 where nothing is compressed. The other arguments are those of `order`.
        """
        compression = self.next_compression(seen_tokens, held_tokens)
        if compression is None:
            return 0
        rest = compression.trigger_tokens - seen_tokens
        if step_tokens < rest:
            return 0
        kept, held = compression.kept_tokens, held_tokens + rest
        return reserved_tokens(compression.selector, kept, held, block_tokens)

    @property
    def shareable_tokens(self) -> int | None:
        """First tokens whose keys and values are those of every request's; None: all.

        After them a request may have dropped what others would see.
        """
        first = self.next_compression(0, 0)
        return None if first is None else first.trigger_tokens

    @property
    def reusable_tokens(self) -> int | None:
        """How much of a cached prefix the request may reuse, so that its voters are computed.

        None: all.
        """
        first = self.next_compression(0, 0)
        return (
            None
            if first is None
            else max(0, first.trigger_tokens - max(1, first.selector.query_tokens))
        )

    def max_held_tokens(self, tokens: int) -> int:
        """The most that the request holds at any time until it has seen that many tokens."""
        read = min(tokens, self.prompt_tokens)
        if tokens <= self.prompt_tokens:
            return read
        kept = self.prompt_tokens if self.policy is None else count_kept_tokens(self.policy, read)
        grown = kept + tokens - self.prompt_tokens
        if self.answer_limit is not None:
            grown = min(grown, max(self.answer_limit.max_tokens, kept + 1))
        return max(read, grown)

    def unused_block_tokens(self, block_tokens: int) -> int:
        """What heads of different length leave empty in their last blocks, at most."""
        apart = self.policy is not None and self.policy.per_head_budget
        return block_tokens - 1 if apart else 0


@dataclass(frozen=True, kw_only=True)
class TurnPlan(PromptPlan):
    """The plan of a session's request, whose prompt may begin with a history that is held."""

    selector_type = TurnSelector

    prefix_tokens: int = 0  # that the blocks stand for with which it begins
    dropped_tokens: int = 0  # of those

    @property
    def shareable_tokens(self) -> int | None:
        return 0 if self.dropped_tokens else super().shareable_tokens

    @property
    def reusable_tokens(self) -> int | None:
        """See `PromptPlan`; what a request with a history reuses is that alone."""
        return 0 if self.prefix_tokens else super().reusable_tokens

    def max_held_tokens(self, tokens: int) -> int:
        return (
            tokens - self.dropped_tokens if self.prefix_tokens else super().max_held_tokens(tokens)
        )
