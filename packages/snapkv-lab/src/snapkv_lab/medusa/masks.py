"""The attention mask of a tree of candidates: which token sees which."""

from typing import Any

import torch
from torch import Tensor

from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.attend import AttentionCall
from snapkv.hf.forward_context import Branches
from snapkv.hf.masks import stored_mask


class TreeBranches(Branches):
    """The branches of a tree of tokens that are read in a single forward pass.

    Args:
        visible: (Q, Q) bool, which candidates each candidate sees.
    """

    def __init__(self, visible: Tensor) -> None:
        self.own_visible = visible
        self._made: dict[Any, tuple[Any, Any]] = {}

    def mask(self, call: AttentionCall) -> Any:
        """Return the mask for a call. Layers that got the same mask share the result.

        Raises:
            UnsupportedModelError: the attention is neither sdpa nor eager.
        """
        slots = call.key.shape[2]
        key = (id(call.mask), slots, call.query.device)
        if key not in self._made:
            mask = tree_mask(call.implementation, call.mask, self.own_visible, call.query, slots)
            self._made[key] = call.mask, mask  # keeps the mask alive, so its id stays unique
        return self._made[key][1]


def tree_mask(implementation: str, mask: Any, visible: Tensor, query: Tensor, slots: int) -> Any:
    """Return the mask for a tree of candidates, made from the mask for as many tokens in a row.

    A candidate stands at its depth in the text. Of the past and of its ancestors it sees what the
    token in that position would see, so sliding windows and hidden padding stay as they are.

    Args:
        implementation: name of the wrapped attention, such as "sdpa".
        mask: the mask that attention received: None, boolean or additive 4-D.
        visible: (Q, Q) bool, which candidates each candidate sees.
        query: (B, Hq, Q, D), the queries of the candidates.
        slots: columns of the mask; the candidates are the last ones.

    Raises:
        UnsupportedModelError: the attention is neither sdpa nor eager.
    """
    if not (implementation in ("sdpa", "eager") and (mask is None or mask.ndim == 4)):
        raise wrong(
            "attn_implementation",
            f"a tree of candidates can be verified with sdpa or eager, but got {implementation}",
            "Load the model with one of them, or draft a chain",
            UnsupportedModelError,
        )
    if mask is None:
        mask = stored_mask(implementation, None, slots, query)
    visible = visible.to(mask.device)
    depths = visible.sum(dim=-1) - 1
    columns = torch.arange(mask.shape[-1], device=mask.device)
    start = len(columns) - query.shape[2]
    own = (columns - start).clamp(min=0)
    of_candidates = columns >= start
    stands_at = torch.where(of_candidates, start + depths[own], columns)
    apart = of_candidates & ~visible[:, own]
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    rows = mask.index_select(2, depths).index_select(3, stands_at)
    return rows.masked_fill(apart, hidden)
