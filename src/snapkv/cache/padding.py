"""Pads between turns: rows of a batch whose turn is shorter, or whose answer has ended early.

The mask of a forward pass says which of all tokens seen are pads. Those in front of a prompt are
read where it ends. Behind it, a pad is told as it comes, or later, when the next turn shows that an
answer had ended; as long as nothing was chosen by its attention since, it can still be hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import UnsupportedModelError
from snapkv.policies import EvictingPolicy


@dataclass(frozen=True, kw_only=True)
class Padding:
    """The pads between turns by the end of a forward pass.

    Attributes:
        seen_tokens: tokens seen by then.
        gaps: (B, seen tokens) bool, the pads behind the first token of each row; None where there
            are none.
        brings_gaps: whether some of them were not known before this pass.
        visible: (B, seen tokens) bool, every token that is no pad.
        hides_nothing: whether every token of the stored slots' columns is visible.
    """

    seen_tokens: int
    gaps: Tensor | None
    brings_gaps: bool
    visible: Tensor
    hides_nothing: bool

    def gaps_of(self, layer: CompressedLayer) -> Tensor | None:
        """The gaps for a layer that has read this forward pass, None for one that reads another."""
        return self.gaps if layer.cumulative_length == self.seen_tokens else None


def find_padding(
    visible: Tensor | None, new_tokens: int, layers: Sequence[CompressedLayer]
) -> Padding | None:
    """Compare the padding of a forward pass with what the layers know.

    Args:
        visible: (B, seen + new) bool, False for pads; None where every token is visible.
        new_tokens: how many tokens the pass reads.
        layers: the compressed ones; all have seen the same tokens.

    Returns:
        None where nothing is said, or before the first prompt has ended.

    Raises:
        UnsupportedModelError: a token that was read as one turns out to be a pad after something
            was chosen by its attention.
    """
    layer = layers[0]
    is_told = visible is not None or (layer.masks_of_the_model and layer.packed_pads is not None)
    if not is_told or not layer.chosen_at:
        return None
    seen = layer.cumulative_length
    total = seen + new_tokens
    if visible is None:
        visible = torch.ones(len(layer.keys), total, dtype=torch.bool, device=layer.keys.device)
    if len(visible) != len(layer.keys):
        return None
    if visible.shape[1] < total:
        visible = _whole(visible, total)
    visible, known = visible[:, :total].clone(), layer.visible_columns(seen)
    visible[:, :seen] &= known  # a pad stays one
    gaps = ~visible
    if layer.pad_tokens is not None:
        columns = torch.arange(total, device=gaps.device)
        gaps = gaps & (columns >= layer.pad_tokens[:, None])
    new = gaps.clone()
    new[:, :seen] &= known
    too_late = _too_late(new[:, :seen], visible[:, seen:], layers)
    _, offset = layer.get_mask_sizes(new_tokens)
    asked = [gaps.any(), new.any(), too_late, visible[:, offset:].all()]
    any_gap, brings_gaps, is_too_late, hides_nothing = torch.stack(asked).tolist()
    if is_too_late:
        raise UnsupportedModelError(
            f"attention_mask: expected tokens that {layer.policy.name} has counted to stay "
            "visible, got a mask that hides some of them now (an answer that had ended before its "
            "batch did); hide pads in the very pass that reads them, or generate such rows one by "
            "one"
        )
    return Padding(
        seen_tokens=total,
        gaps=gaps if any_gap else None,
        brings_gaps=brings_gaps,
        visible=visible,
        hides_nothing=hides_nothing,
    )


def _whole(visible: Tensor, total: int) -> Tensor:
    """A mask that is too short, but hides nothing, for all tokens.

    transformers 5.17 makes such masks where a later prompt is read in pieces.

    Raises:
        UnsupportedModelError: it hides something, and does not say in which columns.
    """
    if not bool(visible.all()):
        raise UnsupportedModelError(
            f"attention_mask: expected a column for each of {total:,} tokens, those seen before "
            f"included, got {visible.shape[1]:,}; pass the whole mask"
        )
    return visible.new_ones(len(visible), total)


def _too_late(hidden: Tensor, own: Tensor, layers: Sequence[CompressedLayer]) -> Tensor:
    """() bool: whether something was already chosen by tokens that turn out to be pads.

    Args:
        hidden: (B, seen) bool, those tokens.
        own: (B, new) bool, the tokens of this pass that are none.
        layers: as above. One that has dropped nothing yet chooses again.
    """
    if isinstance(layers[0].policy, EvictingPolicy):
        return hidden.any()
    chosen_at = max(0 if layer.kept is None else layer.chosen_at for layer in layers)
    chosen_by, history = hidden[:, :chosen_at].any(), layers[0].history_tokens
    if not history:
        return chosen_by
    queries_missing = hidden.any(dim=-1) & (own.sum(dim=-1) < history)
    return chosen_by | queries_missing.any()
