"""What attention is told of a tree of candidates: which token sees which, as a mask."""

from typing import Any

import torch
from torch import Tensor

from snapkv.errors import UnsupportedModelError
from snapkv.hf.attend import AttentionCall
from snapkv.hf.forward_context import Branches
from snapkv.hf.masks import stored_mask


class TreeBranches(Branches):
    """The branches of a tree that one forward pass reads.

    Args:
        visible: (Q, Q) bool, which of the candidates each of them sees.
    """

    def __init__(self, visible: Tensor) -> None:
        self.own_visible = visible
        self._made: dict[Any, tuple[Any, Any]] = {}

    def mask(self, call: AttentionCall) -> Any:
        """Return the mask for a call; layers that were given the same mask share the result."""
        slots = call.key.shape[2]
        given = (id(call.mask), slots, call.query.device)
        if given not in self._made:
            made = tree_mask(call.implementation, call.mask, self.own_visible, call.query, slots)
            self._made[given] = call.mask, made  # the mask given lives on, so does its id
        return self._made[given][1]


def tree_mask(implementation: str, mask: Any, visible: Tensor, query: Tensor, slots: int) -> Any:
    """The mask for a tree of candidates, made of the one for as many tokens in a row.

    A candidate stands at its depth in the text: it sees of the past, and of its ancestors, what the
    token in that place would see. So sliding windows and hidden pads stay as they are.

    Args:
        implementation: name of the wrapped attention, such as "sdpa".
        mask: what attention was given: None, boolean or additive 4-D.
        visible: (Q, Q) bool, which of the candidates each of them sees.
        query: (B, Hq, Q, D), the candidates' queries.
        slots: columns of the mask, of which the candidates are the last.
    """
    if not (implementation in ("sdpa", "eager") and (mask is None or mask.ndim == 4)):
        raise UnsupportedModelError(
            f"attn_implementation: expected sdpa or eager where a tree of candidates is verified, "
            f"got {implementation}; load the model so, or draft a chain"
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
