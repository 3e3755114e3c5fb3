"""What vLLM's attention backends are told of heads that are sequences of their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from snapkv_vllm.heads.step import Sequences


def sequence_metadata(
    plain: Any, found: Sequences, layer: int, *, builder: Any, group_size: int
) -> Any:
    """A backend's metadata, for one layer's sequences in the place of a batch.

    Args:
        plain: what the backend's builder has made of the batch.
        found: the sequences.
        layer: which of their layers.
        builder: the one that made it.
        group_size: query heads that share a KV head.
    """
    own = _PLANS[type(plain).__name__](plain, found, layer, builder, group_size)
    return replace(
        plain,
        num_actual_tokens=len(found.states),
        max_query_len=found.most_new,
        query_start_loc=found.starts,
        max_seq_len=found.most_tokens,
        seq_lens=found.lengths[layer],
        block_table=found.tables[layer],
        slot_mapping=found.slots[layer],
        **own,
    )


def _cpu_plan(
    plain: Any, found: Sequences, layer: int, builder: Any, group_size: int
) -> dict[str, Any]:
    """How the kernel shares out the work among threads, which its builder asks for too."""
    from vllm import _custom_ops as ops
    from vllm import envs

    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=found.lengths.shape[1],
        num_heads=group_size,
        num_kv_heads=1,
        head_dim=builder.head_dim,
        seq_lens=found.lengths[layer],
        dtype=builder.dtype,
        query_start_loc=found.starts,
        causal=plain.causal,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=builder.kv_cache_dtype,
    )
    return {"scheduler_metadata": plan}


_PLANS: dict[str, Callable[..., dict[str, Any]]] = {
    "CPUAttentionMetadata": _cpu_plan,
    # Buffers for splitting long sequences have the batch's size, so they are not split.
    "TritonAttentionMetadata": lambda *_: {"seq_threshold_3D": 0},
    # Made ahead for the batch; without it the kernel plans for itself.
    "FlashAttentionMetadata": lambda *_: {"scheduler_metadata": None},
}
