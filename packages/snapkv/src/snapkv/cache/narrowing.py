"""Some tokens of a prompt are not read by all layers: what the layers they do not reach hold."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.policies import PromptLayer, Selection


@dataclass(kw_only=True)
class Narrowing:
    """Which tokens of a prompt, all of them read in one forward pass, go on from some layer.

    Attributes:
        first_layer: index of the first layer of the model that only some of the tokens reach.
        prompt_tokens: T, how many tokens the prompt has, pads counted.
        choose: picks them by the states of the layer before; None lets all of them go on. Not asked
            where `chosen` is given.
        chosen: the tokens that go on, the same for all heads; None until they are chosen.
        pads: (B,) leading pads of every row of the prompt, or None.
    """

    first_layer: int
    prompt_tokens: int
    choose: Callable[[PromptLayer], Selection | None] | None = None
    chosen: Selection | None = None
    pads: Tensor | None = None

    def on_prompt(self, prompt: PromptLayer) -> None:
        """Choose, where a prompt has been read by the last layer that all tokens reach.

        Args:
            prompt: the layer's states, with the queries of all tokens.
        """
        if self.choose is not None and prompt.layer_idx == self.first_layer - 1:
            self.chosen, self.pads = self.choose(prompt), prompt.pad_tokens

    def places(self, layer_idx: int) -> Tensor | None:
        """(B, n) int64: which tokens of the pass a layer reads, ascending; None for all.

        Where a row has fewer than n, pads or any other tokens stand in front.
        """
        if self.chosen is None or layer_idx < self.first_layer:
            return None
        return self.chosen.keep_indices[:, 0].clamp(min=0)

    def arrived(self, layer: CompressedLayer, tokens: int) -> int:
        """How many tokens of the text a layer has seen, when so many of a pass have reached it."""
        return tokens if self.places(layer.identity.layer_idx) is None else self.prompt_tokens

    def note(self, layer: CompressedLayer) -> None:
        """Tell a layer, which has just stored the tokens that reached it, which ones they are."""
        if self.chosen is None or layer.identity.layer_idx < self.first_layer:
            return
        columns = self.chosen.keep_indices.expand(-1, layer.store.keys.shape[1], -1)
        layer.slots = layer.slots.chosen(
            columns,
            self.prompt_tokens,
            is_partial=True,
            pads=self.pads,
            fillers=self.chosen.filler_tokens,
        )


def only_tokens(tokens: int, places: Tensor) -> Narrowing:
    """A prompt of which all layers read only the tokens at (B, n) places.

    Args:
        tokens: T, how many it has.
        places: int64, ascending.
    """
    chosen = Selection(keep_indices=places[:, None], prompt_tokens=tokens)
    return Narrowing(first_layer=0, prompt_tokens=tokens, chosen=chosen)
