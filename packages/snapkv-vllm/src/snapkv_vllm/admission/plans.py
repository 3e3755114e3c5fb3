"""When and how a request is compressed, and the orders that the scheduler sends to the workers.

A preempted request starts again, and other requests change how its prompt is cut into steps. What a
request keeps must not depend on either. So a plan uses only the numbers of computed and of stored
tokens, and each step ends where the plan says. This module does not import vLLM.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from snapkv.policies import DecodeStep, EvictingPolicy, Policy, PromptLayer
from snapkv.policies.states import LayerStates
from snapkv_vllm.admission.methods import WithSpans, count_kept_tokens


def count_eviction_queries(policy: EvictingPolicy) -> int:
    """Return how many queries of the last tokens the method needs when it evicts tokens from an
    answer. A short answer may have fewer.
    """
    return policy.history_tokens or policy.query_tokens


@dataclass(frozen=True)
class Selector:
    """Selects the tokens that a request keeps, by its stored keys and its recorded queries.
    Subclasses differ in when they are used.
    """

    stage: ClassVar[str]  # the label of this selector in metrics

    policy: Policy
    protect_first: int = field(default=0, kw_only=True)  # first tokens that are kept

    @property
    def per_head_budget(self) -> bool:
        """Whether the heads of a layer may keep different numbers of tokens."""
        return self.policy.per_head_budget

    @property
    def query_tokens(self) -> int:
        """How many queries of the last tokens of the request are needed. It may be more than a
        short prompt has.
        """
        return self.policy.query_tokens

    def select(self, layer: PromptLayer) -> Tensor | None:
        """Select the tokens of the request that are kept.

        Args:
            layer: the stored keys and the recorded queries of some layers, as rows of a batch.

        Returns:
            (layers, H or 1, K) int64 slots in ascending order. If heads keep different numbers of
            tokens, shorter rows begin with -1. None if all tokens are kept.
        """
        selection = self.policy.select(replace(layer, protected=self.protected_mask(layer)))
        return None if selection is None else selection.keep_indices

    def protected_mask(self, layer: LayerStates) -> Tensor | None:
        """Return a mask that marks the first `protect_first` slots, which are always kept. Spans
        are protected by the method itself.

        Returns:
            (layers, 1, S) bool for the S slots of `layer`; None if `protect_first` is 0.
        """
        if not self.protect_first:
            return None
        slots = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        return (slots < self.protect_first).expand(layer.keys.shape[0], 1, -1)


class PromptSelector(Selector):
    """Selects the tokens that are kept at the end of a prompt."""

    stage = "prompt"


class TurnSelector(PromptSelector):
    """Selects the tokens that are kept at the end of a prompt, if the beginning of the prompt may
    have been compressed before.
    """

    def select_with_positions(self, layer: PromptLayer, positions: Tensor | None) -> Tensor | None:
        """Select the tokens of the request that are kept, and return their slots, not their
        positions.

        Args:
            layer: the stored keys and the recorded queries of some layers, as rows of a batch.
            positions: (layers, 1 or H, S) int64, the position of the token in each of the S slots;
                None if slots are positions. Only a method with spans uses them.

        Returns:
            (layers, H or 1, K) int64, as `select` returns them; None if all tokens are kept.
        """
        policy = self.policy
        if positions is None or not isinstance(policy, WithSpans):
            return self.select(layer)
        return policy.select_with_positions(layer, positions).keep_indices


@dataclass(frozen=True)
class AnswerSelector(Selector):
    """Selects the tokens that are kept while a request generates its answer."""

    stage = "generating"
    per_head_budget = False

    policy: EvictingPolicy  # it gets no columns, because the served methods need none
    # How many last queries the method gets. They are fewer than it needs if the answer is short.
    queries: int

    @property
    def query_tokens(self) -> int:
        return self.queries

    def select(self, layer: PromptLayer) -> Tensor | None:
        """Select the tokens that are kept while an answer is generated.

        Args:
            layer: the stored keys and the recorded queries of some layers, as rows of a batch.

        Returns:
            (layers, H or 1, K) int64 slots in ascending order. The result is never None.
        """
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


# Orders of the scheduler to the workers.


@dataclass(frozen=True, kw_only=True)
class Move:
    """The blocks of a request before and after a compression, in one KV cache group. Blocks are
    numbers of vLLM's blocks, in the order of their tokens.
    """

    group: int  # index of vLLM's KV cache group
    sources: tuple[int, ...]  # the blocks of its tokens
    targets: tuple[int, ...]  # the blocks of the kept tokens, which may be some of the sources


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order from the scheduler to the workers: what to do with one request in the step with
    which the order is sent.
    """

    selector: Selector
    query_tokens: int  # the number of last tokens of the step whose queries are recorded
    seen_tokens: int  # computed tokens after the step
    held_tokens: int  # how many of them are stored before the compression
    is_due: bool  # whether the request is compressed after this step
    kept_tokens: int  # how many tokens are kept, on average over heads
    moves: tuple[Move, ...] = ()  # one for each compressed KV cache group

    @property
    def per_head_budget(self) -> bool:
        """Whether the heads of a layer may keep different numbers of tokens."""
        return self.selector.per_head_budget

    def reserved_tokens(self, block_tokens: int) -> int:
        """Return for how many tokens per KV head there must be space in the blocks of the kept
        tokens; see the function `reserved_tokens`.
        """
        return reserved_tokens(self.selector, self.kept_tokens, self.held_tokens, block_tokens)

    @property
    def dropped_tokens(self) -> int:
        """How many of the computed tokens are no longer stored after the compression, on average
        over heads.
        """
        return self.seen_tokens - self.kept_tokens


def reserved_tokens(selector: Selector, kept: int, held: int, block_tokens: int) -> int:
    """Return for how many tokens per KV head there must be space in the blocks of the kept tokens.

    If heads keep different numbers of tokens, the last page of a head may hold a single token. Then
    `block_tokens - 1` tokens are added to the mean, but never more than `held`.

    Args:
        selector: selects the tokens.
        kept: how many tokens a head keeps on average.
        held: how many tokens are stored before the compression.
        block_tokens: the size of a block.
    """
    if selector.per_head_budget:
        return min(kept + block_tokens - 1, held)
    return kept


# Plans.


@dataclass(frozen=True, kw_only=True)
class AnswerLimit:
    """The limit on the number of tokens that a request stores while it generates its answer."""

    policy: EvictingPolicy
    max_tokens: int  # stored tokens of prompt and answer after each generated token
    evict_every: int  # generated tokens between two evictions, and tokens that each evicts


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A compression of a request that is still to come: when it happens, and what it keeps."""

    trigger_tokens: int  # the number of computed tokens at which it happens
    kept_tokens: int
    selector: Selector


@dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """The plan of a request: when it is compressed, with which method, and to how many tokens.

    The scheduler and the block manager use it.
    """

    selector_type: ClassVar[type[PromptSelector]] = PromptSelector

    prompt_tokens: int
    policy: Policy | None = None  # compresses the prompt; None keeps all of it
    protect_first: int = 0  # first tokens that are kept, besides those of spans
    answer_limit: AnswerLimit | None = None

    def next_compression(self, seen_tokens: int, held_tokens: int) -> Compression | None:
        """Return the next compression of a request, or None if there will be none. It is the
        compression of the prompt while the prompt is read and tokens will be evicted from it, and
        an eviction from the answer otherwise.

        Args:
            seen_tokens: how many tokens have been computed.
            held_tokens: how many of them are stored.
        """
        compression = None
        if seen_tokens < self.prompt_tokens:
            compression = self._prompt_compression(held_tokens + self.prompt_tokens - seen_tokens)
        return compression or self._answer_compression(seen_tokens, held_tokens)

    def _prompt_compression(self, held_then: int) -> Compression | None:
        """Return the compression at the end of the prompt, or None if all tokens of the prompt are
        kept.

        Args:
            held_then: how many tokens are stored when the prompt has been read.
        """
        if self.policy is None or (kept := count_kept_tokens(self.policy, held_then)) == held_then:
            return None
        selector = self.selector_type(self.policy, protect_first=self.protect_first)
        return Compression(trigger_tokens=self.prompt_tokens, kept_tokens=kept, selector=selector)

    def _answer_compression(self, seen: int, held: int) -> Compression | None:
        """Return the next eviction from the answer, or None if the answer has no limit.

        Args:
            seen: how many tokens have been computed.
            held: how many of them are stored.
        """
        if (limit := self.answer_limit) is None:
            return None
        due = max(self.prompt_tokens, seen - held + limit.max_tokens - 1) + 1
        queries = min(count_eviction_queries(limit.policy), due - self.prompt_tokens)
        selector = AnswerSelector(limit.policy, queries, protect_first=self.protect_first)
        kept = limit.max_tokens - limit.evict_every
        return Compression(trigger_tokens=due, kept_tokens=kept, selector=selector)

    def limit_step(self, seen_tokens: int, held_tokens: int, offered_tokens: int) -> int:
        """Return how many of the offered tokens a step may compute, so that it does not go beyond
        the next compression. Without a compression it is all of them.

        Args:
            seen_tokens: tokens that are computed before the step.
            held_tokens: how many of them are stored.
            offered_tokens: how many tokens vLLM would compute in the step.
        """
        compression = self.next_compression(seen_tokens, held_tokens)
        if compression is None:
            return offered_tokens
        return min(offered_tokens, compression.trigger_tokens - seen_tokens)

    def make_order(self, seen_tokens: int, held_tokens: int, step_tokens: int) -> Order | None:
        """Return the order for the workers in a step, or None if they only have to run the model,
        because the step neither ends with a compression nor computes queries that one needs.

        The moves of the order are still empty; the caller must add them if the order is due.

        Args:
            seen_tokens: tokens that are computed before the step.
            held_tokens: how many of them are stored.
            step_tokens: tokens that the step computes.
        """
        compression = self.next_compression(seen_tokens, held_tokens)
        if compression is None:
            return None
        computed, trigger = seen_tokens + step_tokens, compression.trigger_tokens
        first = max(seen_tokens, trigger - compression.selector.query_tokens)
        queries, is_due = max(0, computed - first), computed == trigger
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
        """Return for how many tokens per KV head blocks must be reserved because a step ends with a
        compression. The result is 0 if it does not.

        Args:
            seen_tokens: tokens that are computed before the step.
            held_tokens: how many of them are stored.
            step_tokens: tokens that the step computes.
            block_tokens: the size of a block.
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
        """How many tokens at the beginning have keys and values that other requests may reuse,
        which are those up to the first compression; None for all tokens.

        Later tokens may have been computed without tokens that this request has dropped.
        """
        first = self.next_compression(0, 0)
        return None if first is None else first.trigger_tokens

    @property
    def reusable_tokens(self) -> int | None:
        """How many tokens at the beginning the request may take from the prefix cache; None for all
        tokens, if it is never compressed.

        The tokens that vote, and at least the last one before the first compression, must be
        computed, because their queries are not in the cache.
        """
        if (first := self.next_compression(0, 0)) is None:
            return None
        return max(0, first.trigger_tokens - max(1, first.selector.query_tokens))

    def max_held(self, tokens: int) -> int:
        """Return the largest number of tokens per head that the request stores at any time, until
        it has computed `tokens` tokens. A compression counts only once the prompt has been read,
        because all of the prompt is stored before.
        """
        read = min(tokens, self.prompt_tokens)
        if tokens <= self.prompt_tokens:
            return read
        kept = self.prompt_tokens if self.policy is None else count_kept_tokens(self.policy, read)
        grown = kept + tokens - self.prompt_tokens
        if self.answer_limit is not None:
            grown = min(grown, max(self.answer_limit.max_tokens, kept + 1))
        return max(read, grown)

    def unused_block_tokens(self, block_tokens: int) -> int:
        """Return the largest number of slots in its blocks that the request cannot use, because its
        heads keep different numbers of tokens: one less than `block_tokens`, the size of a block.
        It is 0 if all heads keep the same number.
        """
        is_ragged = self.policy is not None and self.policy.per_head_budget
        return block_tokens - 1 if is_ragged else 0


@dataclass(frozen=True, kw_only=True)
class TurnPlan(PromptPlan):
    """The plan of a request that belongs to a session. Such a request may begin with a stored
    history.
    """

    selector_type = TurnSelector

    prefix_tokens: int = 0  # tokens of the history with which the request begins
    dropped_tokens: int = 0  # how many of them are no longer stored

    @property
    def shareable_tokens(self) -> int | None:
        """How many tokens at the beginning have keys and values that other requests may reuse; None
        for all tokens. It is 0 if the history has dropped tokens.
        """
        return 0 if self.dropped_tokens else super().shareable_tokens

    @property
    def reusable_tokens(self) -> int | None:
        """How many tokens at the beginning the request may take from the prefix cache. The number
        is 0 if it begins with a history.
        """
        return 0 if self.prefix_tokens else super().reusable_tokens

    def max_held(self, tokens: int) -> int:
        """Return the largest number of tokens per head that the request stores at any time, until
        it has computed `tokens` tokens. If it begins with a history, its own compression is not
        counted.
        """
        return tokens - self.dropped_tokens if self.prefix_tokens else super().max_held(tokens)
