"""The attention mask of a tree of candidates: which token sees which."""

from typing import Any

import torch
from torch import Tensor

from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.attend import AttentionCall
from snapkv.hf.forward_context import Branches
from snapkv.hf.masks import stored_mask


class TreeBranches(Branches):
    """The branches of a tree of tokens that are read in a single forward pass, for the attention
    layers.

    Args:
        visible: (Q, Q) bool, which of the Q candidates each candidate sees: itself and its
            ancestors.
    """

    def __init__(self, visible: Tensor) -> None:
        self.own_visible = visible
        self._made: dict[Any, tuple[Any, Any]] = {}

    def mask(self, call: AttentionCall) -> Any:
        """Return the attention mask for a call of a layer, in which branches do not see each other.
        Calls with the same mask, number of slots and device share the result.

        Raises:
            UnsupportedModelError: the attention is neither sdpa nor eager, or its mask is not 4-D.
        """
        slots = call.key.shape[2]
        key = (id(call.mask), slots, call.query.device)
        if key not in self._made:
            mask = tree_mask(call.implementation, call.mask, self.own_visible, call.query, slots)
            self._made[key] = call.mask, mask  # keeps the mask alive, so its id stays unique
        return self._made[key][1]


def tree_mask(implementation: str, mask: Any, visible: Tensor, query: Tensor, slots: int) -> Any:
    """Return the mask for a tree of candidates, made from the mask for a sequence of Q tokens.

    The position of a candidate is that of the root plus its depth. A candidate sees the past and
    its ancestors, as far as a token in that position sees them, so sliding windows and hidden
    padding stay as they are. It does not see other candidates.

    Args:
        implementation: name of the wrapped attention, such as "sdpa".
        mask: the mask that attention received: None, boolean or additive 4-D.
        visible: (Q, Q) bool, which candidates each candidate sees.
        query: (B, Hq, Q, D), the queries of the candidates.
        slots: columns of the mask; the candidates are the last ones.

    Returns:
        A new mask with the shape and the dtype of `mask`, or for None, of the mask that `mask`
        stands for.

    Raises:
        UnsupportedModelError: the attention is neither sdpa nor eager, or its mask is not 4-D.
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
