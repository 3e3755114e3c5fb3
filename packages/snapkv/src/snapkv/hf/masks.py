"""Attention masks of every implementation: counting padding, and masks over stored slots.

The form of a mask in transformers depends on the attention implementation: None, a boolean 4-D
tensor (sdpa), an additive 4-D tensor (eager), a 2-D tensor (flash) or a BlockMask (flex).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from snapkv import ops
from snapkv.errors import UnsupportedModelError, wrong

_HIDDEN = -9e3  # people add -1e4 or less to hide a token; in bfloat16 that is -9,984


def mask_function(implementation: str) -> Callable[..., Any]:
    """Return transformers' mask function of an implementation, corrected for flex attention."""
    make_mask: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    return functools.partial(_flex_mask, make_mask) if "flex" in implementation else make_mask


def _flex_mask(
    make_mask: Callable[..., Any],
    *,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """Make a flex mask whose rows and columns are counted from zero.

    The offsets are moved into `mask_function`, so that the mask also fits stored slots.
    """
    shifted = mask_function
    if q_offset or kv_offset:
        rows = torch.tensor(q_offset, device=options.get("device"))
        columns = torch.tensor(kv_offset, device=options.get("device"))

        def shifted(batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Any:
            return mask_function(batch, head, query + rows, slot + columns)

        attention_mask = None if attention_mask is None else attention_mask[:, kv_offset:]
    return make_mask(mask_function=shifted, attention_mask=attention_mask, **options)


def leading_pads(
    mask: Any, query_idx: int, prompt_tokens: int, window_tokens: int
) -> Tensor | None:
    """Count the padding tokens in front of every row, and check the mask of the prompt's end.

    Waits for a GPU once.

    Args:
        mask: the mask of the forward pass that reads the end of the prompt.
        query_idx: the index of the prompt's last query in this pass.
        prompt_tokens: the number of tokens of the prompt, including padding.
        window_tokens: the number of last queries that vote; their mask must be causal.

    Returns:
        (B,) int64; None if there is no padding or no mask.

    Raises:
        InvalidArgumentError: a row consists of padding only.
        UnsupportedModelError: the mask has another width, hides tokens after a row's first token,
            or is not causal for the voting queries.
    """
    if mask is None:
        return None
    rows = min(max(window_tokens, 1), query_idx + 1)
    visible = _visible(mask, query_idx + 1 - rows, rows, prompt_tokens)
    last = visible[:, 0, -1]
    if last.shape[-1] != prompt_tokens:
        raise wrong(
            "attention_mask",
            f"expected one column for each of the {prompt_tokens:,} tokens, but got "
            f"{last.shape[-1]:,} columns",
            "Pass a mask that has the same length as the input_ids",
            UnsupportedModelError,
        )
    pads = prompt_tokens - last.sum(dim=-1)
    columns = torch.arange(prompt_tokens, device=last.device)
    elsewhere = (last != (columns >= pads[:, None])).any()
    not_causal = torch.zeros_like(elsewhere)
    if not (isinstance(mask, Tensor) and mask.ndim == 2):
        not_causal = _sees_otherwise(visible, pads)
    empty = (pads == prompt_tokens).any()
    # Stacked, so that the GPU is waited for once instead of four times.
    faults = torch.stack([elsewhere, not_causal, empty, pads.any()])
    is_elsewhere, is_not_causal, has_empty_row, has_pads = faults.tolist()
    if is_elsewhere:
        raise wrong(
            "attention_mask",
            "expected padding on the left only, but got masked positions at the end or in the "
            "middle of the prompt",
            "Tokenize with padding_side='left', or pass attention_mask if the text itself contains "
            "the pad token",
            UnsupportedModelError,
        )
    if has_empty_row:
        raise wrong(
            "attention_mask",
            "expected at least one token in every row, but got rows of padding alone",
            "Leave these rows out of the batch",
        )
    if is_not_causal:
        raise wrong(
            "attention_mask",
            "expected a causal mask over the observation window, but got packed sequences or "
            "tokens that see each other in both directions",
            "Read each sequence as a row of its own, with causal attention",
            UnsupportedModelError,
        )
    return pads if has_pads else None


def _visible(mask: Any, first_row: int, rows: int, columns: int) -> Tensor:
    """Return which slots each query can see, for a mask of any form.

    Args:
        mask: a BlockMask, a 2-D tensor (B, S), or a 4-D tensor, boolean or additive.
        first_row: the first query.
        rows: the number of queries.
        columns: the number of slots.

    Returns:
        (B, H or 1, rows, columns) bool; one row instead of `rows` for a 2-D mask.
    """
    if isinstance(mask, BlockMask):
        device = mask.kv_num_blocks.device
        batch = torch.arange(mask.shape[0], device=device)[:, None, None]
        queries = torch.arange(first_row, first_row + rows, device=device)[:, None]
        slots = torch.arange(columns, device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        seen: Tensor = mask.mask_mod(batch, zero, queries, slots)
        return seen.expand(mask.shape[0], rows, columns).unsqueeze(1)
    if mask.ndim == 2:
        mask, first_row = mask[:, None, None] != 0, 0
    part: Tensor = mask[:, :, first_row : first_row + rows, :columns]
    return part if part.dtype == torch.bool else part > _HIDDEN


def _sees_otherwise(visible: Tensor, pads: Tensor) -> Tensor:
    """Check whether the mask of the last queries differs from a causal mask with left padding.

    Args:
        visible: (B, H or 1, rows, columns) bool, the mask of the last `rows` queries.
        pads: (B,) int64, the number of padding tokens in front of each row.

    Returns:
        A () bool tensor, True if the masks differ. It is not read here, which would wait for a GPU.
    """
    rows, columns = visible.shape[-2:]
    expected = ops.window_visibility(rows, columns, pads, device=visible.device)
    positions = torch.arange(columns - rows, columns, device=visible.device)
    real = (positions >= pads[:, None])[:, None, :, None]
    return ((visible != expected) & real).any()


def sees_ahead(mask: Any, new_tokens: int) -> bool:
    """Return whether a mask differs from a causal one among the last `new_tokens` tokens.

    Only 4-D masks are checked; for any other mask the result is False.
    """
    if mask is None or len(mask.shape) != 4:
        return False
    rows, columns = mask.shape[-2:]
    seen = _visible(mask, rows - new_tokens, new_tokens, columns).sum(dim=-1)
    # With a causal mask, each token sees one slot more than the token before it.
    return bool((seen.diff(dim=-1) != 1).any())


def stored_mask(implementation: str, hidden_slots: Tensor | None, slots: int, query: Tensor) -> Any:
    """Make the mask for the queries of the last tokens of a cache.

    Args:
        implementation: the attention's name, which decides the form of the mask.
        hidden_slots: (B,) int64, how many leading slots of each row are hidden; None for none.
        slots: how many slots are stored, those of the queries' own tokens included.
        query: (B, Hq, Q, D).

    Returns:
        A mask over all slots. For flash attention it is None if every slot is visible.
    """
    B, _, Q, _ = query.shape
    order = torch.arange(slots, device=query.device)
    first = torch.zeros_like(order[:1]) if hidden_slots is None else hidden_slots
    columns = (order >= first[:, None]).expand(B, -1)
    if "flash" in implementation:
        return None if bool(columns.all()) else columns
    if "flex" in implementation:
        return _block_mask(columns, Q)
    allowed = columns[:, None, None] & (order <= order[slots - Q :, None])
    if implementation != "eager":
        return allowed
    lowest = torch.finfo(query.dtype).min
    return torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, lowest)


def _block_mask(columns: Tensor, query_tokens: int) -> BlockMask:
    """Create a mask over the stored slots for flex attention.

    Args:
        columns: (B, S + Q) bool, True for the slots that are not hidden.
        query_tokens: the number of queries, Q.
    """
    slots = torch.tensor(columns.shape[-1] - query_tokens, device=columns.device)

    def sees(batch: Tensor, _: Tensor, query_idx: Tensor, slot: Tensor) -> Tensor:
        return columns[batch, slot] & (slot <= query_idx + slots)

    return create_block_mask(
        sees, columns.shape[0], None, query_tokens, columns.shape[-1], device=columns.device
    )
