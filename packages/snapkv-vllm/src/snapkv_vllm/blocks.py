"""Frees blocks of compressed requests: vLLM's manager for full attention, with fewer stored
tokens.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from snapkv.errors import UnsupportedModelError, wrong
from snapkv_vllm.admission.plans import Move, Order, PromptPlan


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(FullAttentionSpec):
    """The spec for layers with full attention in which a request may store fewer tokens than it has
    computed.
    """


@dataclass(frozen=True, kw_only=True)
class CompressedLatentSpec(MLAAttentionSpec):
    """The spec for layers with latent attention in which a request may store fewer tokens than it
    has computed.
    """


COUNTERPARTS: dict[type[FullAttentionSpec], type[FullAttentionSpec]] = {
    FullAttentionSpec: CompressedSpec,
    MLAAttentionSpec: CompressedLatentSpec,
}
"""The specs of vLLM whose layers can be compressed, and this plugin's specs for them."""


def compress_spec(spec: FullAttentionSpec) -> FullAttentionSpec:
    """Return this plugin's counterpart of one of vLLM's specs, whose type must be in
    `COUNTERPARTS`, with the same values in all fields.
    """
    own = {one.name: getattr(spec, one.name) for one in fields(spec) if one.init}
    return COUNTERPARTS[type(spec)](**own)


def is_compressed(spec: Any) -> bool:
    """Whether prompts are compressed in the KV cache group that has this spec.

    Raises:
        UnsupportedModelError: the group has layers with full attention and layers with a sliding
            window.
    """
    specs = getattr(spec, "kv_cache_specs", {"": spec}).values()  # layers of different sizes
    found = {type(one) in COUNTERPARTS.values() for one in specs}
    if len(found) > 1 or any(_has_window_among_full(one) for one in specs):
        problem = "vLLM has put layers with a sliding window and with full attention into one group"
        option = "Start the server without --disable-hybrid-kv-cache-manager"
        remedy = f"{option}, or serve the model with stock vLLM"
        raise wrong("snapkv", problem, remedy, UnsupportedModelError)
    return found == {True}


def _has_window_among_full(spec: Any) -> bool:
    """Whether vLLM treats a layer with a sliding window as if it had full attention."""
    if not isinstance(spec, FullAttentionSpec):
        return False
    return spec.sliding_window is not None or spec.attention_chunk_size is not None


class CompressedManager(FullAttentionManager):
    """vLLM's block manager for full attention, changed to count the tokens that a request stores:
    all computed tokens without those that it has dropped.

    Attributes:
        dropped_tokens: how many tokens each compressed request has dropped, by request id. With
            heads of different lengths the tokens for which space is reserved are not counted as
            dropped.
        plans: the plans of all requests, by request id; this is the dict of the scheduler.
        missing_blocks: how many more blocks the last request of `get_num_blocks_to_allocate` needs
            for the tokens that it will keep.
        reservations: the blocks that are reserved for the kept tokens of a request, by request id:
            new ones, and some of its own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropped_tokens: dict[str, int] = {}
        self.plans: Mapping[str, PromptPlan] = {}
        self.missing_blocks = 0
        self._pins: Counter[int] = Counter()
        self._begun_with_history: set[str] = set()
        self.reservations: dict[str, tuple[list[KVCacheBlock], list[KVCacheBlock]]] = {}

    def exclusive_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """Return the blocks of a request that no other request uses, in reverse order, so that the
        last block comes first. A request without blocks has none.
        """
        return [one for one in reversed(self.req_to_blocks.get(request_id, ())) if one.ref_cnt == 1]

    def blocks_to_reserve(self, request_id: str, seen_tokens: int, step_tokens: int) -> int:
        """Return how many blocks must be reserved for the tokens that a request keeps at the end of
        this step.

        The result is 0 if the step does not end with a compression. It is also 0 if no other
        request may read the blocks of this request, because then the kept tokens move to the first
        of these blocks. Otherwise its blocks are freed unchanged, and the kept tokens move to other
        blocks: with prefix caching other requests can find the old blocks by their content, and
        blocks of a history belong to the history.

        Args:
            request_id: the id of the request.
            seen_tokens: tokens that are computed before the step.
            step_tokens: tokens that the step computes.
        """
        plan, dropped = self.plans.get(request_id), self.dropped_tokens.get(request_id, 0)
        if plan is None or not self._is_shared(request_id):
            return 0
        held, size = seen_tokens - dropped, self.block_size
        blocks: int = cdiv(plan.tokens_to_reserve(seen_tokens, held, step_tokens, size), size)
        return blocks

    def _is_shared(self, request_id: str) -> bool:
        """Whether other requests may read the blocks of this request: because it begins with a
        history, or by the prefix cache while it has dropped nothing.
        """
        if request_id in self._begun_with_history:
            return True
        return bool(self.enable_caching) and not self.dropped_tokens.get(request_id, 0)

    def reserve(self, request_id: str, blocks: int, fresh_blocks: int) -> None:
        """Reserve blocks for the tokens that a request keeps at the end of this step.

        The pool must have `fresh_blocks` free blocks. The reservation ends with `compress`, or when
        the blocks of the request are freed.

        Args:
            request_id: the id of the request.
            blocks: how many blocks to reserve.
            fresh_blocks: how many of them are taken from the pool. The others are exclusive blocks
                of the request, which are removed from the prefix cache.
        """
        own = self.exclusive_blocks(request_id)[: blocks - fresh_blocks]
        self.block_pool.evict_blocks(set(_ids(own)))
        self.reservations[request_id] = self.block_pool.get_new_blocks(fresh_blocks), own

    def compress(self, request_id: str, order: Order) -> Move:
        """Free the blocks that a request no longer needs after a compression, and return from which
        blocks to which blocks its kept tokens move. The blocks of the request and its
        `dropped_tokens` are changed here; the tokens themselves are moved later by the workers.

        The targets are the blocks that were reserved with `reserve`, and the reservation ends.
        Without a reservation they are the first blocks of the request, which no other request may
        read then.
        """
        blocks = self.req_to_blocks[request_id]
        reserved = order.reserved_tokens(self.block_size)
        sources = _ids(blocks[: cdiv(order.held_tokens, self.block_size)])
        in_place: list[KVCacheBlock] = blocks[: cdiv(reserved, self.block_size)]
        is_safe = request_id in self.reservations or not self._is_shared(request_id)
        assert is_safe, "others may read these blocks"
        self._begun_with_history.discard(request_id)
        fresh, own = self.reservations.pop(request_id, ([], in_place))
        stay = set(_ids(own))
        self.block_pool.free_blocks(one for one in reversed(blocks) if one.block_id not in stay)
        blocks[:] = fresh + own
        self.dropped_tokens[request_id] = order.seen_tokens - reserved
        return Move(group=self.kv_cache_group_id, sources=sources, targets=_ids(blocks))

    def holds(self, request_id: str, tokens: int, dropped_tokens: int) -> bool:
        """Whether a request has blocks for at least `tokens` stored tokens and has dropped exactly
        `dropped_tokens`.
        """
        dropped = self.dropped_tokens.get(request_id, 0)
        blocks = len(self.req_to_blocks.get(request_id, ()))
        return dropped == dropped_tokens and blocks * self.block_size >= tokens

    def pin_blocks(self, request_id: str, tokens: int) -> list[KVCacheBlock]:
        """Pin the blocks of the first `tokens` stored tokens of a request, so that they stay
        allocated after the request has ended, and return them in a new list.
        """
        of_request: list[KVCacheBlock] = self.req_to_blocks[request_id]
        blocks = of_request[: cdiv(tokens, self.block_size)]
        self.block_pool.touch(blocks)
        self._pins.update(_ids(blocks))
        return blocks

    def unpin_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Release blocks that were pinned with `pin_blocks`. A block becomes free if no request
        uses it and it is not pinned for another history.
        """
        self._pins -= Counter(_ids(blocks))
        self.block_pool.free_blocks(reversed(blocks))

    def count_unused_blocks(self, kept: Iterable[Sequence[KVCacheBlock]]) -> int:
        """Count the pinned blocks that are not used by any request.

        Args:
            kept: the blocks of each history; a block that several histories share is counted once.
        """
        blocks = {block.block_id: block for of_one in kept for block in of_one}
        return sum(one.ref_cnt <= self._pins[number] for number, one in blocks.items())

    def begin_with_history(self, request_id: str, dropped_tokens: int) -> None:
        """Record that a request begins with the blocks of a history, which has dropped
        `dropped_tokens` tokens. The blocks are assigned later, by `add_local_computed_blocks`.
        """
        self._begun_with_history.add(request_id)
        if dropped_tokens:
            self.dropped_tokens[request_id] = dropped_tokens

    # Methods that vLLM calls, with numbers of computed tokens.

    def _has_partial_local_hit(
        self, new_computed_blocks: Sequence[KVCacheBlock], *args: Any
    ) -> bool:
        """Whether vLLM must copy the last of the blocks with which a request begins, because that
        block is only partly filled.

        vLLM derives this from the number of tokens, which is wrong for the blocks of histories:
        they store fewer tokens than they stand for. So the result is False for them, and for no
        blocks at all.
        """
        if self._pins.keys() >= set(_ids(new_computed_blocks)):
            return False
        partial: bool = super()._has_partial_local_hit(new_computed_blocks, *args)
        return partial

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Assign to a request the blocks with which it begins, and keep them allocated for it.
        Histories need this even if prefix caching is disabled.
        """
        if self.enable_caching or not new_computed_blocks:
            super().add_local_computed_blocks(
                request_id,
                new_computed_blocks,
                num_local_computed_tokens,
                num_external_computed_tokens,
            )
            return
        self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id].extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(new_computed_blocks)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Return how many more blocks a request needs, including the blocks for the tokens that it
        will keep. With `apply_admission_cap` the result is the largest number that it will need at
        any time.

        Also sets `missing_blocks`. The other arguments are those of vLLM.
        """
        plan = self.plans.get(request_id)
        if apply_admission_cap and plan is not None:
            most = plan.max_held(num_tokens)
            held = min(max(num_tokens, most), most + plan.unused_block_tokens(self.block_size))
        else:
            held = num_tokens - self.dropped_tokens.get(request_id, 0)
        cached = new_computed_blocks, total_computed_tokens, num_local_computed_tokens
        missing: int = super().get_num_blocks_to_allocate(
            request_id, held, *cached, num_tokens_main_model, **kwargs
        )
        step_tokens = num_tokens_main_model - total_computed_tokens
        self.missing_blocks = 0
        if needed := self.blocks_to_reserve(request_id, total_computed_tokens, step_tokens):
            own = missing + len(self.exclusive_blocks(request_id))
            if self._has_partial_local_hit(new_computed_blocks, num_local_computed_tokens):
                own -= 2  # a block is copied in this step; it and its copy are not exclusive
            self.missing_blocks = max(0, needed - own)
        return missing + self.missing_blocks

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Allocate blocks as vLLM does, for the tokens that the request stores, and return the new
        ones.
        """
        dropped = self.dropped_tokens.get(request_id, 0)
        blocks: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens - dropped, num_tokens_main_model - dropped
        )
        return blocks

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Add the full blocks of a request to the prefix cache. Nothing is added if the request was
        compressed or begins with a compressed history, because its blocks are not the prefix of any
        prompt.
        """
        if request.request_id not in self.dropped_tokens:
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Forget a request that has finished, was aborted or is preempted, and return its blocks
        together with those that were reserved for it, for the caller to free.
        """
        self.dropped_tokens.pop(request_id, None)
        self._begun_with_history.discard(request_id)
        fresh, _ = self.reservations.pop(request_id, ([], []))
        return [*super().pop_blocks_for_free(request_id), *fresh]


def cache_only_exact_blocks(coordinator: Any, plans: Mapping[str, PromptPlan]) -> None:
    """Patch vLLM's coordinator so that it does not add blocks to the prefix cache that were
    computed after a compression.

    Layers with a window or a recurrent state are not compressed, but after a compression their
    states depend on the layers that are.

    Args:
        coordinator: vLLM's coordinator of the block managers, changed in place.
        plans: the plans of all requests, by request id, which are looked up at each call. The
            blocks of a request without a plan are all added.
    """
    cache = coordinator.cache_blocks

    def cache_exact(request: Any, num_computed_tokens: int) -> None:
        plan = plans.get(request.request_id)
        shared = None if plan is None else plan.shareable_tokens
        tokens = num_computed_tokens if shared is None else min(num_computed_tokens, shared)
        cache(request, tokens)

    coordinator.cache_blocks = cache_exact


def _ids(blocks: Sequence[KVCacheBlock]) -> tuple[int, ...]:
    return tuple(block.block_id for block in blocks)


class CompressedBlocks:
    """The blocks of compressed requests in all KV cache groups with full attention, as one object
    for the scheduler.

    Args:
        managers: the block managers of these groups, at least one, by the index of the group.
        plans: the plans of all requests, by request id, which the managers look up from now on.
    """

    def __init__(
        self, managers: Mapping[int, CompressedManager], plans: Mapping[str, PromptPlan]
    ) -> None:
        self._managers = managers
        for manager in managers.values():
            manager.plans = plans

    def dropped_tokens(self, request_id: str) -> int:
        """Return how many tokens a request has dropped, 0 if none; this number is the same in every
        KV cache group.
        """
        return next(iter(self._managers.values())).dropped_tokens.get(request_id, 0)

    @property
    def lack_blocks(self) -> bool:
        """Whether the last request that asked for blocks needs more blocks for the tokens that it
        will keep than it has itself.
        """
        return any(manager.missing_blocks for manager in self._managers.values())

    @property
    def hold_blocks(self) -> bool:
        """Whether blocks of the pool are reserved for the tokens that requests keep in the current
        step.
        """
        managers = self._managers.values()
        return any(fresh for one in managers for fresh, _ in one.reservations.values())

    def reserve(
        self, request_id: str, seen_tokens: int, step_tokens: int, *, others_blocks: int
    ) -> None:
        """Reserve blocks, in every KV cache group, for the tokens that a request keeps in a step.
        Nothing is reserved if the step ends without a compression, or if the kept tokens can move
        to the request's own blocks.

        Blocks of the pool are used while more than `others_blocks` are free, and after that the
        request's own blocks, which are removed from the prefix cache.

        Args:
            request_id: the id of the request. The blocks of the step itself must be allocated
                before.
            seen_tokens: tokens that are computed before the step.
            step_tokens: tokens that the step computes.
            others_blocks: how many free blocks of the pool are left to other requests of the step,
                unless the request has too few blocks of its own.
        """
        reservations, least = {}, {}
        for manager in self._managers.values():
            needed = manager.blocks_to_reserve(request_id, seen_tokens, step_tokens)
            if needed:
                reservations[manager] = needed
                least[manager] = max(0, needed - len(manager.exclusive_blocks(request_id)))
        for manager, needed in reservations.items():
            free = manager.block_pool.get_num_free_blocks() - sum(least.values())
            spare = max(0, free - others_blocks)
            manager.reserve(request_id, needed, min(needed, spare + least.pop(manager)))

    def compress(self, request_id: str, order: Order) -> tuple[Move, ...]:
        """Free the blocks that a request no longer needs after a compression, in every KV cache
        group.

        Returns:
            One move per group, in the order of the managers; see `CompressedManager.compress`.
        """
        return tuple(manager.compress(request_id, order) for manager in self._managers.values())


def register_spec() -> None:
    """Register the specs of this plugin and their block manager with vLLM in this process. They
    have no effect until a worker uses them.

    Errors of an unsupported version of vLLM go through unchanged.
    """
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers vLLM's own specs first
    for spec in COUNTERPARTS.values():
        KVCacheSpecRegistry.register(
            spec, CompressedManager, uniform_type_base_spec=FullAttentionSpec
        )


def find_compressed_managers(managers: Sequence[Any]) -> dict[int, Any]:
    """Return the managers of the KV cache groups that are compressed, by the index of the group.

    Args:
        managers: the managers of all groups.

    Raises:
        UnsupportedModelError: no group is compressed, because the worker of this plugin is not
            used.
    """
    found = {group: one for group, one in enumerate(managers) if type(one) is CompressedManager}
    if not found:
        kinds = ", ".join(type(manager).__name__ for manager in managers)
        problem = f"there are no blocks that can be compressed, because the managers are {kinds}"
        remedy = "Pass worker_cls and scheduler_cls together, as snapkv_vllm.engine_args does"
        raise wrong("snapkv", problem, remedy, UnsupportedModelError)
    return found
