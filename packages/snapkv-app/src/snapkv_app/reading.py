"""Report how far a model has read a text, while it reads."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from snapkv.errors import UnsupportedModelError
from snapkv.prefill.decoder import decoder_layers

TokenSink = Callable[[int, int], None]
"""Called with the tokens that are read, and those of the text."""


@contextlib.contextmanager
def telling_of_reading(model: Any, on_tokens: TokenSink) -> Iterator[None]:
    """Call `on_tokens` after every layer within this block, with how far a text is read.

    A text counts as read in proportion to the layers that have read it. Steps of one token are not
    reported, and nothing is if the model's layers cannot be found.
    """
    try:
        layers = decoder_layers(model)
    except UnsupportedModelError:
        layers = []
    text = 0

    def tell(place: int, _module: nn.Module, _arguments: Any, output: Any) -> None:
        nonlocal text
        states: Tensor = output[0] if isinstance(output, tuple) else output
        text = states.shape[1] if place == 0 else text  # later layers may read fewer tokens
        if text > 1:
            on_tokens(text * (place + 1) // len(layers), text)

    with contextlib.ExitStack() as hooked:
        for place, layer in enumerate(layers):
            hook = functools.partial(tell, place)
            hook.of_texts_only = True  # type: ignore[attr-defined] # so that steps are recorded
            hooked.callback(layer.register_forward_hook(hook).remove)
        yield
