"""Frees blocks of compressed requests: vLLM's manager for full attention, with fewer tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(FullAttentionSpec):
    """Full attention whose requests may hold fewer tokens than they have seen."""


@dataclass(frozen=True)
class Compressed:
    """What compressing one request did to its blocks.

    Attributes:
        target_blocks: fresh blocks for the kept tokens; None for the first of the request's own.
        blocks_freed: how many blocks fewer the request holds.
    """

    target_blocks: tuple[int, ...] | None
    blocks_freed: int


class CompressedManager(FullAttentionManager):
    """Counts the tokens a request holds, which are those it has seen less those it dropped.

    Attributes:
        dropped_tokens: of every request whose prompt has ended; 0 where it was left whole.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropped_tokens: dict[str, int] = {}

    def leave_whole(self, request_id: str) -> None:
        """Note that the request's prompt has ended and stays as it is."""
        self.dropped_tokens[request_id] = 0

    def compress(
        self, request_id: str, *, prompt_tokens: int, kept_tokens: int
    ) -> Compressed | None:
        """Free the blocks that the kept tokens of a prompt do not need.

        Without prefix caching the kept tokens move to the front of the request's own blocks. With
        it those blocks may be shared and can be found by their content, so they are released as
        they are and the kept tokens go to others. Those may be released ones: the workers read all
        that a step keeps before they write any of it.

        Returns:
            None where there is no room for the kept tokens: all blocks of the prompt are shared and
            too few others are free. The request then stays whole.
        """
        blocks = self.req_to_blocks[request_id]
        held = len(blocks)
        needed = cdiv(kept_tokens, self.block_size)
        if not self.enable_caching:
            released = blocks[needed:]
            del blocks[needed:]
            self.block_pool.free_blocks(reversed(released))
            targets = None
        else:
            unshared = sum(block.ref_cnt == 1 for block in blocks)
            if self.block_pool.get_num_free_blocks() + unshared < needed:
                self.leave_whole(request_id)
                return None
            self.block_pool.free_blocks(reversed(blocks))
            blocks[:] = self.block_pool.get_new_blocks(needed)
            targets = tuple(block.block_id for block in blocks)
        self.dropped_tokens[request_id] = prompt_tokens - kept_tokens
        return Compressed(target_blocks=targets, blocks_freed=held - needed)

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
        if not self.dropped_tokens.get(request.request_id):
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Forget a request that has finished, was aborted or is preempted."""
        self.dropped_tokens.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks


def register_spec() -> None:
    """Make the spec and its manager known to vLLM in this process; without effect until used."""
    KVCacheSpecRegistry._ensure_registered()  # else vLLM would skip its own
    KVCacheSpecRegistry.register(
        CompressedSpec, CompressedManager, uniform_type_base_spec=FullAttentionSpec
    )
