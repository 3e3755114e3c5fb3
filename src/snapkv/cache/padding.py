"""Pads between turns: rows of a batch whose turn is shorter, or whose answer has ended early.

The mask of a forward pass says which of all tokens seen are pads. Those in front of a prompt are
read where it ends. Behind it, a pad is told as it comes, or later, when the next turn shows that an
answer had ended; as long as nothing was chosen by its attention since, it can still be hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.paging import Recall
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
        return self.gaps if layer.seen_tokens == self.seen_tokens else None


class PaddingWatch:
    """What the masks of a cache's forward passes say of its pads.

    Args:
        layers: the compressed ones.
        recall: how the cache recalls dropped tokens; None where it does not.

    Attributes:
        masked_to: tokens seen by the end of the pass that the last mask was made for.
    """

    def __init__(self, layers: Sequence[CompressedLayer], recall: Recall | None) -> None:
        self.layers, self.recall = layers, recall
        self.masked_to: int | None = None
        self._last: Padding | None = None

    def expect(self, visible: Tensor | None, new_tokens: int) -> Padding | None:
        """Announce the padding of the next forward pass, as its masks are made of it.

        Args:
            visible: (B, tokens seen + new) bool, which of them are no pads; None for all.
            new_tokens: how many the pass will read.

        Returns:
            The pads between turns by then; None where it does not say.

        Raises:
            UnsupportedModelError: pads between turns that this cache cannot hide any more.
        """
        first = self.layers[0]
        if not first.storage.is_compileable:
            self.masked_to = first.seen_tokens + new_tokens
        found = self._last = find_padding(visible, new_tokens, self.layers)
        if found is not None and found.brings_gaps and self.recall is not None:
            recall = str(self.recall) if isinstance(self.recall, Path) else self.recall
            raise UnsupportedModelError(
                f"attention_mask: expected no pads between turns with recall={recall!r}, "
                "whose turns are read over all that was seen, got some; leave recall out, or ask "
                "the rows one by one"
            )
        for layer in self.layers:
            if not layer.store.hands_over:
                _tell(layer, None if found is None else found.gaps)
        return found

    def tell(self, layer: CompressedLayer) -> None:
        """Tell a layer that has just appended the tokens of the pass which of them are pads."""
        _tell(layer, None if self._last is None else self._last.gaps_of(layer))

    def has_own_mask(self, layer: CompressedLayer) -> bool:
        """Whether a mask that comes with the pass the layer has just read is the user's own."""
        return self.masked_to != layer.seen_tokens

    def forget(self) -> None:
        """What was read last is taken back."""
        self._last = None

    def of(self, layers: Sequence[CompressedLayer]) -> "PaddingWatch":
        """The same for copies of the layers."""
        copied = PaddingWatch(layers, self.recall)
        copied.masked_to, copied._last = self.masked_to, self._last
        return copied


def _tell(layer: CompressedLayer, gaps: Tensor | None) -> None:
    """Tell a layer the gaps of all tokens it has seen; None where those that came are none."""
    if gaps is not None or layer.slots.gaps is not None:
        layer.slots = layer.slots.with_gaps(gaps, layer.seen_tokens)


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
    has_pads = layer.storage.is_compileable and layer.slots.packed_pads is not None
    is_told = visible is not None or has_pads
    if not is_told or not layer.slots.chosen_at:
        return None
    seen = layer.seen_tokens
    total = seen + new_tokens
    if visible is None:
        visible = torch.ones(len(layer.keys), total, dtype=torch.bool, device=layer.keys.device)
    if len(visible) != len(layer.keys):
        return None
    if visible.shape[1] < total:
        visible = _whole(visible, total)
    visible, known = visible[:, :total].clone(), layer.slots.visible_columns(layer.store, seen)
    visible[:, :seen] &= known  # a pad stays one
    gaps = ~visible
    if layer.slots.pads is not None:
        columns = torch.arange(total, device=gaps.device)
        gaps = gaps & (columns >= layer.slots.pads[:, None])
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
    chosen_at = max(0 if layer.slots.kept is None else layer.slots.chosen_at for layer in layers)
    chosen_by, history = hidden[:, :chosen_at].any(), layers[0].history_tokens
    if not history:
        return chosen_by
    queries_missing = hidden.any(dim=-1) & (own.sum(dim=-1) < history)
    return chosen_by | queries_missing.any()
