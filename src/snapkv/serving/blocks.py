"""Frees blocks of compressed requests: vLLM's manager for full attention, with fewer tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from snapkv.errors import UnsupportedModelError
from snapkv.serving.heads.places import held_tokens
from snapkv.serving.orders import Move


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


def compressed(spec: FullAttentionSpec) -> FullAttentionSpec:
    """What a layer has, that keeps one of `COUNTERPARTS`, when it is compressed."""
    own = {one.name: getattr(spec, one.name) for one in fields(spec) if one.init}
    return COUNTERPARTS[type(spec)](**own)


def is_compressed(spec: Any) -> bool:
    """Whether a KV cache group is compressed, by its spec.

    Raises:
        UnsupportedModelError: vLLM put layers into the group that are not.
    """
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
        dropped_tokens: of every request whose prompt has ended; 0 where it was left whole.
        rewritten: requests whose blocks no longer hold their tokens one after the other.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropped_tokens: dict[str, int] = {}
        self.rewritten: set[str] = set()

    def unshared_blocks(self, request_id: str) -> int:
        """Blocks of a request that go back to the pool when it gives them up."""
        return sum(block.ref_cnt == 1 for block in self.req_to_blocks[request_id])

    def keep(self, request_id: str, *, prompt_tokens: int, kept_tokens: int) -> tuple[int, ...]:
        """Free the blocks that the kept tokens of a prompt do not need.

        Without prefix caching the kept tokens move to the front of the request's own blocks. With
        it those blocks may be shared and can be found by their content, so they are released as
        they are and the kept tokens go to others. Those may be released ones: the workers read all
        that a step keeps before they write any of it.

        Returns:
            The blocks for the kept tokens.
        """
        blocks = self.req_to_blocks[request_id]
        needed = cdiv(kept_tokens, self.block_size)
        if self.enable_caching:
            self.block_pool.free_blocks(reversed(blocks))
            blocks[:] = self.block_pool.get_new_blocks(needed)
        else:
            released = blocks[needed:]
            del blocks[needed:]
            self.block_pool.free_blocks(reversed(released))
        self.dropped_tokens[request_id] = prompt_tokens - kept_tokens
        self.rewritten.add(request_id)
        return tuple(block.block_id for block in blocks)

    # What vLLM asks, in tokens seen.

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Blocks that a request lacks."""
        held = num_tokens - self.dropped_tokens.get(request_id, 0)
        missing: int = super().get_num_blocks_to_allocate(request_id, held, *args, **kwargs)
        return missing

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Give a request the blocks it lacks."""
        dropped = self.dropped_tokens.get(request_id, 0)
        blocks: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens - dropped, num_tokens_main_model - dropped
        )
        return blocks

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Offer full blocks to other requests; those of a compressed one are no prefix any more."""
        if request.request_id not in self.rewritten:
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Forget a request that has finished, was aborted or is preempted."""
        self.dropped_tokens.pop(request_id, None)
        self.rewritten.discard(request_id)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks


class CompressedBlocks:
    """The blocks of compressed requests, in all KV cache groups with full attention.

    Args:
        managers: those groups' managers, by the group's index.
    """

    def __init__(self, managers: Mapping[int, CompressedManager]) -> None:
        self._managers = managers

    def ended(self, request_id: str) -> bool:
        """Whether the request's prompt has ended, compressed or not."""
        return any(request_id in one.dropped_tokens for one in self._managers.values())

    def leave_whole(self, request_id: str) -> None:
        """Note that the request's prompt has ended and stays as it is."""
        for manager in self._managers.values():
            manager.dropped_tokens[request_id] = 0

    def compress(
        self, request_id: str, *, prompt_tokens: int, kept_tokens: int, parts_heads: bool = False
    ) -> tuple[Move, ...] | None:
        """Free the blocks that the kept tokens of a prompt do not need, in every group.

        Args:
            request_id: whose prompt ends.
            prompt_tokens: its length.
            kept_tokens: what stays of it, on average over the heads of a layer.
            parts_heads: whether heads hold different numbers of tokens, which takes more room.

        Returns:
            None where there is no room for the kept tokens: all blocks of the prompt are shared and
            too few others are free. The request then stays whole.
        """
        held_of = {
            group: held_tokens(kept_tokens, prompt_tokens, manager.block_size)
            if parts_heads
            else kept_tokens
            for group, manager in self._managers.items()
        }
        if not self._room(request_id, held_of):
            self.leave_whole(request_id)
            return None
        moves = []
        for group, manager in self._managers.items():
            held = manager.req_to_blocks[request_id]
            used = cdiv(prompt_tokens, manager.block_size)
            sources = tuple(block.block_id for block in held[:used])
            targets = manager.keep(
                request_id, prompt_tokens=prompt_tokens, kept_tokens=held_of[group]
            )
            moves.append(Move(group=group, sources=sources, targets=targets))
        return tuple(moves)

    def _room(self, request_id: str, held_tokens_of: Mapping[int, int]) -> bool:
        """Whether the blocks for the kept tokens are there once the prompt's own are given up."""
        room = needed = 0
        for group, manager in self._managers.items():
            if not manager.enable_caching:
                return True
            room = max(room, manager.block_pool.get_num_free_blocks())
            needed += cdiv(held_tokens_of[group], manager.block_size)
        unshared = sum(one.unshared_blocks(request_id) for one in self._managers.values())
        return room + unshared >= needed


def register_spec() -> None:
    """Make the spec and its manager known to vLLM in this process; without effect until used."""
    KVCacheSpecRegistry._ensure_registered()  # else vLLM would skip its own
    for spec in COUNTERPARTS.values():
        KVCacheSpecRegistry.register(
            spec, CompressedManager, uniform_type_base_spec=FullAttentionSpec
        )
