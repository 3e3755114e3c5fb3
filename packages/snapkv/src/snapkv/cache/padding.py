"""What the masks of forward passes say of pads: they stand in front of a row, and nowhere else.

Those in front of a prompt are read where it ends. Behind a row's first token there are none: a
batch whose turns or answers differ in length is refused before anything of it is read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import UnsupportedModelError


class PaddingWatch:
    """Looks at the masks of a cache's forward passes as they are made.

    Args:
        layers: the compressed ones.

    Attributes:
        masked_to: tokens seen by the end of the pass that the last mask was made for.
    """

    def __init__(self, layers: Sequence[CompressedLayer]) -> None:
        self.layers = layers
        self.masked_to: int | None = None

    def expect(self, visible: Tensor | None, new_tokens: int) -> Tensor | None:
        """The padding of the next forward pass, to make its masks of; None where all is visible.

        Args:
            visible: (B, tokens seen + new) bool, which of them are no pads; None for all.
            new_tokens: how many the pass will read.

        Returns:
            (B, tokens seen + new) bool.

        Raises:
            UnsupportedModelError: pads behind a row's first token.
        """
        layer = self.layers[0]
        if not layer.storage.is_compileable:
            self.masked_to = layer.seen_tokens + new_tokens
        if not layer.slots.chosen_at or (visible is None and layer.slots.pads is None):
            return visible
        total = layer.seen_tokens + new_tokens
        known = layer.slots.visible_columns(layer.store, total)
        if visible is None:
            return known
        if len(visible) != len(known):
            return visible
        if visible.shape[1] < total:
            visible = _whole(visible, total)
        visible = visible[:, :total]
        _, offset = layer.get_mask_sizes(new_tokens)
        rows = (known & ~visible).any(dim=-1).sum()
        hidden_rows, hides_nothing = torch.stack([rows, known[:, offset:].all()]).tolist()
        if hidden_rows:
            raise UnsupportedModelError(
                f"attention_mask: expected no padding after a row's first token, since a row is "
                f"one conversation, got {hidden_rows} of {len(visible)} rows with some (a turn or "
                "an answer shorter than others of the batch); give each conversation a cache of "
                "its own"
            )
        return None if hides_nothing else known  # a pad stays one

    def has_own_mask(self, layer: CompressedLayer) -> bool:
        """Whether a mask that comes with the pass the layer has just read is the user's own."""
        return self.masked_to != layer.seen_tokens

    def of(self, layers: Sequence[CompressedLayer]) -> "PaddingWatch":
        """The same for copies of the layers."""
        copied = PaddingWatch(layers)
        copied.masked_to = self.masked_to
        return copied


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
