"""Measure how fast a model reads, report how far it has read a text, and stop it in time."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from snapkv.errors import UnsupportedModelError
from snapkv.hf.placement import device_of
from snapkv.prefill.decoder import decoder_layers

TokenSink = Callable[[int, int], None]
"""Called with the number of tokens that have been read, and the number of tokens of the text."""


@contextlib.contextmanager
def telling_of_reading(model: Any, on_tokens: TokenSink) -> Iterator[None]:
    """Call `on_tokens` after every layer that reads a text within this block.

    It is called with the number of tokens that have been read, and the number of tokens of the
    text. The first number grows in proportion to the layers that have read the text, up to the
    second. Decode steps of one token are not reported. Nothing is reported if the layers of the
    model cannot be found.
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


class TimeTooShortError(Exception):
    """The error that ends reading a text in `reading_until`; it is no error of the user.

    Attributes:
        needed: the seconds that reading the text would take.
        left: the seconds that there were for it.
    """

    def __init__(self, *, needed: float, left: float) -> None:
        self.needed, self.left = needed, left


@contextlib.contextmanager
def reading_until(model: Any, end: float) -> Iterator[None]:
    """Stop reading the first text within this block if it would not be read before `end`.

    After each layer, the time of all layers is estimated. Texts after the first one, which is the
    prompt, are not stopped. Nothing is stopped if the model's layers cannot be found.

    Args:
        model: the model that reads.
        end: the time at which the text must be read, in seconds of `perf_counter`.

    Raises:
        TimeTooShortError: the text would be read later than at `end`.
    """
    begin, is_read = perf_counter(), False

    def check(tokens: int, of_tokens: int) -> None:
        nonlocal is_read
        needed = (perf_counter() - begin) * of_tokens / max(tokens, 1)
        if not is_read and needed > end - begin:
            raise TimeTooShortError(needed=needed, left=end - begin)
        is_read = is_read or tokens == of_tokens

    with telling_of_reading(model, check):
        yield


_SPEED_TOKENS = 64
"""The number of tokens that are read to measure the speed."""


def reading_speed(model: Any) -> float:
    """Measure how many tokens per second the model reads.

    It reads 64 tokens twice, and only the second pass counts, since the first one also loads the
    weights.
    """
    ids = torch.zeros(1, _SPEED_TOKENS, dtype=torch.int64, device=device_of(model))
    with torch.inference_mode():
        for _ in range(2):
            begin = perf_counter()
            model(ids, use_cache=False).logits.sum().item()  # waits for the device
            seconds = perf_counter() - begin
    return _SPEED_TOKENS / seconds
