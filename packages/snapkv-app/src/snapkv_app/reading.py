"""Report how much of a text a model has read, while it is reading."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from snapkv.errors import UnsupportedModelError
from snapkv.prefill.decoder import decoder_layers

TokenSink = Callable[[int, int], None]
"""Called with the number of tokens that have been read, and the number of tokens of the text."""


@contextlib.contextmanager
def telling_of_reading(model: Any, on_tokens: TokenSink) -> Iterator[None]:
    """Call `on_tokens` with the progress of reading a text, after every layer within this block.

    The number of tokens that have been read grows in proportion to the layers that have read the
    text. Decode steps of one token are not reported. Nothing is reported if the layers of the model
    cannot be found.
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
