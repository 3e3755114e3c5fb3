"""Frees blocks of compressed requests: vLLM's manager for full attention, with fewer tokens."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from snapkv.errors import UnsupportedModelError
from snapkv_vllm.admission.plans import Move, Order, PromptPlan


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(FullAttentionSpec):
    """Full attention whose requests may hold fewer tokens than they have seen."""


@dataclass(frozen=True, kw_only=True)
class CompressedLatentSpec(MLAAttentionSpec):
    """The same where a latent is stored for all heads."""


COUNTERPARTS: dict[type[FullAttentionSpec], type[FullAttentionSpec]] = {
    FullAttentionSpec: CompressedSpec,
    MLAAttentionSpec: CompressedLatentSpec,
}
"""The specs of vLLM whose layers can be compressed, and what these then have."""


def to_compressed_spec(spec: FullAttentionSpec) -> FullAttentionSpec:
    """What a layer has, that keeps one of `COUNTERPARTS`, when it is compressed."""
    own = {one.name: getattr(spec, one.name) for one in fields(spec) if one.init}
    return COUNTERPARTS[type(spec)](**own)


def is_compressed(spec: Any) -> bool:
    """Whether a KV cache group is compressed, by its spec."""
    specs = getattr(spec, "kv_cache_specs", {"": spec}).values()  # of layers that differ in size
    found = {type(one) in COUNTERPARTS.values() for one in specs}
    if len(found) > 1 or any(_has_window_among_full(one) for one in specs):
        raise UnsupportedModelError(
            "snapkv: cannot compress prompts: vLLM put layers with a sliding window into one group "
            "of blocks with layers of full attention, expected groups of their own; leave "
            "--disable-hybrid-kv-cache-manager out, or serve the model with stock vLLM"
        )
    return found == {True}


def _has_window_among_full(spec: Any) -> bool:
    """Whether vLLM counts a layer's blocks as of full attention, though it sees a part."""
    if not isinstance(spec, FullAttentionSpec):
        return False
    return spec.sliding_window is not None or spec.attention_chunk_size is not None


class CompressedManager(FullAttentionManager):
    """Counts the tokens a request holds, which are those it has seen less those it dropped.

    Attributes:
        dropped_tokens: of every request that was compressed.
        plans: of all requests that are known, by request; the scheduler's.
        lacking_blocks: that the request vLLM asked about last needs more for what it will keep.
        rooms: blocks set aside for what a step keeps of a request: fresh ones, and of its own.
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
        """Blocks of a request that nobody else holds, the last first."""
        return [one for one in reversed(self.req_to_blocks.get(request_id, ())) if one.ref_cnt == 1]

    def blocks_to_reserve(self, request_id: str, seen_tokens: int, step_tokens: int) -> int:
        """Blocks that the tokens move to which a request keeps within so many computed tokens.

        None where its blocks are its own: they then move to the front of these. With prefix caching
        those may be shared and can be found by their content, and what a history lends is its own,
        so they are released as they are, the first time, and the kept tokens go to others.
        """
        plan, dropped = self.plans.get(request_id), self.dropped_tokens.get(request_id, 0)
        if plan is None or not self._may_be_shared(request_id):
            return 0
        held, size = seen_tokens - dropped, self.block_size
        blocks: int = cdiv(plan.tokens_to_reserve(seen_tokens, held, step_tokens, size), size)
        return blocks

    def _may_be_shared(self, request_id: str) -> bool:
        """Whether others may read the blocks of a request."""
        if request_id in self._begun_with_history:
            return True
        return bool(self.enable_caching) and not self.dropped_tokens.get(request_id, 0)

    def reserve(self, request_id: str, blocks: int, fresh_blocks: int) -> None:
        """Set blocks aside for what a step keeps: some fresh ones, and of its own for the rest.

        Nobody finds these by their content from now on.
        """
        own = self.exclusive_blocks(request_id)[: blocks - fresh_blocks]
        self.block_pool.evict_blocks(set(_ids(own)))
        self.reservations[request_id] = self.block_pool.get_new_blocks(fresh_blocks), own

    def compress(self, request_id: str, order: Order) -> Move:
        blocks = self.req_to_blocks[request_id]
        room = order.reserved_tokens(self.block_size)
        sources = _ids(blocks[: cdiv(order.held_tokens, self.block_size)])
        in_place: list[KVCacheBlock] = blocks[: cdiv(room, self.block_size)]
        assert request_id in self.reservations or not self._may_be_shared(request_id), (
            "others may read these"
        )
        self._begun_with_history.discard(request_id)
        fresh, own = self.reservations.pop(request_id, ([], in_place))
        stay = set(_ids(own))
        self.block_pool.free_blocks(one for one in reversed(blocks) if one.block_id not in stay)
        blocks[:] = fresh + own
        self.dropped_tokens[request_id] = order.seen_tokens - room
        return Move(group=self.kv_cache_group_id, sources=sources, targets=_ids(blocks))

    def holds(self, request_id: str, tokens: int, dropped_tokens: int) -> bool:
        """Whether a request has so many tokens in blocks, and has dropped so many."""
        dropped = self.dropped_tokens.get(request_id, 0)
        blocks = len(self.req_to_blocks.get(request_id, ()))
        return dropped == dropped_tokens and blocks * self.block_size >= tokens

    def pin_blocks(self, request_id: str, tokens: int) -> list[KVCacheBlock]:
        """The blocks of the first tokens a request holds, which stay when it gives them up."""
        of_request: list[KVCacheBlock] = self.req_to_blocks[request_id]
        blocks = of_request[: cdiv(tokens, self.block_size)]
        self.block_pool.touch(blocks)
        self._pins.update(_ids(blocks))
        return blocks

    def unpin_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Free what `keep_for_others` has kept."""
        self._pins -= Counter(_ids(blocks))
        self.block_pool.free_blocks(reversed(blocks))

    def count_unused_blocks(self, kept: Iterable[Sequence[KVCacheBlock]]) -> int:
        """How many of the blocks that `keep_for_others` has kept no request holds."""
        blocks = {block.block_id: block for of_one in kept for block in of_one}
        return sum(one.ref_cnt <= self._pins[number] for number, one in blocks.items())

    def begin_with_history(self, request_id: str, dropped_tokens: int) -> None:
        """Count that the blocks which a request reuses hold fewer tokens than they stand for."""
        self._begun_with_history.add(request_id)
        if dropped_tokens:
            self.dropped_tokens[request_id] = dropped_tokens

    # What vLLM asks, in tokens seen.

    def _has_partial_local_hit(
        self, new_computed_blocks: Sequence[KVCacheBlock], *args: Any
    ) -> bool:
        """What is reused are full blocks, however many tokens they stand for."""
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
        """Give a request the blocks that it begins with; histories come without prefix caching."""
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
        """Blocks that a request lacks, with room for what it will keep of the tokens.

        Before it is admitted, the most that it will lack.
        """
        plan = self.plans.get(request_id)
        if apply_admission_cap and plan is not None:
            most = plan.max_held_tokens(num_tokens)
            held = min(max(num_tokens, most), most + plan.unused_block_tokens(self.block_size))
        else:
            held = num_tokens - self.dropped_tokens.get(request_id, 0)
        cached = new_computed_blocks, total_computed_tokens, num_local_computed_tokens
        missing: int = super().get_num_blocks_to_allocate(
            request_id, held, *cached, num_tokens_main_model, **kwargs
        )
        step_tokens = num_tokens_main_model - total_computed_tokens
        self.missing_blocks = 0
        if room := self.blocks_to_reserve(request_id, total_computed_tokens, step_tokens):
            own = missing + len(self.exclusive_blocks(request_id))
            if self._has_partial_local_hit(new_computed_blocks, num_local_computed_tokens):
                own -= 2  # the block that is copied, and its copy, are not its own for this step
            self.missing_blocks = max(0, room - own)
        return missing + self.missing_blocks

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        dropped = self.dropped_tokens.get(request_id, 0)
        blocks: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens - dropped, num_tokens_main_model - dropped
        )
        return blocks

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Offer full blocks to other requests; those of a compressed one are no prefix any more."""
        if request.request_id not in self.dropped_tokens:
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Forget a request that has finished, was aborted or is preempted."""
        self.dropped_tokens.pop(request_id, None)
        self._begun_with_history.discard(request_id)
        fresh, _ = self.reservations.pop(request_id, ([], []))
        return [*super().pop_blocks_for_free(request_id), *fresh]


def cache_only_exact_blocks(coordinator: Any, plans: Mapping[str, PromptPlan]) -> None:
    """Let vLLM's coordinator of all groups offer no block of what was read after a compression.

    Layers with a window or a recurrent state are not compressed, but what they store then comes out
    of layers that are.
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
    """The blocks of compressed requests, in all KV cache groups with full attention."""

    def __init__(
        self, managers: Mapping[int, CompressedManager], plans: Mapping[str, PromptPlan]
    ) -> None:
        self._managers = managers
        for manager in managers.values():
            manager.plans = plans

    def dropped_tokens(self, request_id: str) -> int:
        """How many tokens the request has dropped, in every group."""
        return next(iter(self._managers.values())).dropped_tokens.get(request_id, 0)

    @property
    def lack_blocks(self) -> bool:
        """Whether the request vLLM asked about last needs more blocks for what it will keep."""
        return any(manager.missing_blocks for manager in self._managers.values())

    @property
    def hold_reserved_blocks(self) -> bool:
        """Whether blocks that were free are set aside for what the step under way keeps."""
        reservations = (
            room for manager in self._managers.values() for room in manager.reservations.values()
        )
        return any(fresh for fresh, _ in reservations)

    def reserve(
        self, request_id: str, seen_tokens: int, step_tokens: int, *, others_blocks: int
    ) -> None:
        """Set blocks aside for what a step keeps of a request, once it has those of the step.

        Fresh ones while there are more than `others_blocks`, so that the request's own can still be
        found, and that other requests of the step find some.
        """
        reservations, least = {}, {}
        for manager in self._managers.values():
            room = manager.blocks_to_reserve(request_id, seen_tokens, step_tokens)
            if room:
                reservations[manager] = room
                least[manager] = max(0, room - len(manager.exclusive_blocks(request_id)))
        for manager, room in reservations.items():
            free = manager.block_pool.get_num_free_blocks() - sum(least.values())
            spare = max(0, free - others_blocks)
            manager.reserve(request_id, room, min(room, spare + least.pop(manager)))

    def compress(self, request_id: str, order: Order) -> tuple[Move, ...]:
        """Free the blocks that the kept tokens of a request do not need, in every group."""
        return tuple(manager.compress(request_id, order) for manager in self._managers.values())


def register_spec() -> None:
    """Make the spec and its manager known to vLLM in this process; without effect until used."""
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers vLLM's own, if ours are first
    for spec in COUNTERPARTS.values():
        KVCacheSpecRegistry.register(
            spec, CompressedManager, uniform_type_base_spec=FullAttentionSpec
        )


def find_compressed_managers(managers: Sequence[Any]) -> dict[int, Any]:
    """The managers of the KV cache groups that are compressed, by the group's index."""
    found = {group: one for group, one in enumerate(managers) if type(one) is CompressedManager}
    if not found:
        kinds = ", ".join(type(manager).__name__ for manager in managers)
        raise UnsupportedModelError(
            f"snapkv: expected a group of blocks that may be compressed, got {kinds}; pass "
            "worker_cls and scheduler_cls together, as snapkv_vllm.engine_args does"
        )
    return found
