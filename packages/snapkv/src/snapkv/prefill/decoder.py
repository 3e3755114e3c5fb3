"""Tools for a decoder's layers: replacing `forward`, splitting arguments, watching memory."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from snapkv.errors import OutOfMemoryError, UnsupportedModelError, wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.device_memory import free_bytes, out_of_memory_explained
from snapkv.hf.placement import device_of


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the model's decoder, from the bottom to the top.

    Raises:
        UnsupportedModelError: among the parts of the decoder there is no list with as many modules
            as the configuration has layers, or more than one.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        list(part)
        for part in model.get_decoder().children()
        if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if len(found) != 1:
        got = f"{type(model).__name__} with {len(found)} such lists"
        problem = f"expected a decoder with exactly one list of its {count} layers, but got {got}"
        remedy = "Set prefill_chunk_size to read the prompt in chunks instead"
        raise wrong("model", problem, remedy, UnsupportedModelError)
    return found[0]


@contextlib.contextmanager
def replacing_forward(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the `forward` of some modules within this block, and restore it at the end.

    Changes the modules in place. They are restored after an error, too.

    Args:
        forwards: the function to call in place of each module's `forward`, without `self`.

    Raises:
        UnsupportedModelError: the `forward` of a module has already been replaced, and not by
            accelerate. No module is changed then.
    """
    before = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    if not all(map(_brings_to_device, before)):
        problem = "some of the layers are already wrapped by snapkv.prefill or another library"
        raise wrong("model", problem, "Use only one of the two", UnsupportedModelError)
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)
            if module in before:
                vars(module)["forward"] = before[module]


def _brings_to_device(module: nn.Module) -> bool:
    """Return whether accelerate has replaced the module's `forward` in order to move inputs."""
    hooked = getattr(module.forward, "func", None)
    return getattr(hooked, "__module__", "") == "accelerate.hooks"


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return how many tokens a call of the decoder reads in each row, padding included.

    The inputs are the first positional argument, `input_ids` or `inputs_embeds`. The result is 0 if
    the call has none of them.
    """
    given = (args[0] if args else None, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    return next((each.shape[1] for each in given if each is not None), 0)


class ReadEnough(Exception):  # noqa: N818 - no error
    """Raised within a forward pass to end it early. The caller that began the pass catches it."""


def require_by_token(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
    """Raise if the arguments of a layer cannot be split into parts for single tokens.

    Args:
        args: the positional arguments after the hidden states.
        kwargs: the keyword arguments.
        tokens: how many tokens the layer reads.

    Raises:
        UnsupportedModelError: there is a positional argument; a tensor without an axis of `tokens`
            tokens, which is the third of four axes and otherwise the second; or an object that is
            neither a tensor, a number, a text, None, a cache, nor a tuple of these.
    """
    odd = [f"argument {number}" for number, _ in enumerate(args, 2)]
    odd += [name for name, value in kwargs.items() if not _is_by_token(value, tokens)]
    if odd:
        problem = f"{odd[0]} of a layer cannot be split, because it is not one value per token"
        remedy = "Set prefill_chunk_size to read the prompt in chunks, and use sdpa attention"
        raise wrong("model", problem, remedy, UnsupportedModelError)


def _is_by_token(value: Any, tokens: int) -> bool:
    if isinstance(value, tuple):
        return all(_is_by_token(item, tokens) for item in value)
    if isinstance(value, Tensor):
        return value.ndim >= 2 and value.shape[2 if value.ndim == 4 else 1] == tokens
    return value is None or isinstance(value, bool | int | float | str | Cache)


def part_of(value: Any, start: int, stop: int) -> Any:
    """Return the part of a layer's argument that belongs to the tokens from `start` to `stop`.

    A tensor with four axes is a mask, with the queries along the third axis; the columns of earlier
    turns come before those of the tokens, and columns from `stop` on are left out. Any other tensor
    has the tokens along its second axis: (B, T) masks and position ids, and (B, T, D) position
    embeddings.

    Args:
        value: the argument, which must have passed `require_by_token`.
        start: the first token.
        stop: the token after the last one.

    Returns:
        A view of the tensor, or a tuple of views; anything else is returned unchanged.
    """
    if isinstance(value, tuple):
        return tuple(part_of(item, start, stop) for item in value)
    if not isinstance(value, Tensor):
        return value
    if value.ndim != 4:
        return value[:, start:stop]
    earlier = value.shape[-1] - value.shape[-2]
    return value[..., start:stop, : earlier + stop]


def at_places(value: Any, places: Tensor) -> Any:
    """Return the part of a layer's argument that belongs to some of its tokens.

    Args:
        value: the argument, as in `part_of`; a mask with four axes is (B or 1, H or 1, T, T).
        places: (B, n) int64, the ascending indices of the tokens in each row.

    Returns:
        A new tensor with n tokens in each of B rows, or a tuple of such tensors; of a mask, both
        the queries and the columns of these tokens. Anything else is returned unchanged.
    """
    if isinstance(value, tuple):
        return tuple(at_places(item, places) for item in value)
    if not isinstance(value, Tensor):
        return value
    value, places = value.expand(len(places), *value.shape[1:]), places.to(value.device)
    rows = torch.arange(len(places), device=value.device)[:, None]
    if value.ndim != 4:
        return value[rows, places]
    of_queries = value.transpose(1, 2)[rows, places]  # (B, n, H, T)
    return of_queries.transpose(1, 2).take_along_dim(places[:, None, None], dim=-1)


class MemoryWatch:
    """A record of the prompt that is being read, for an error message if memory runs out.

    Attributes:
        cache: the cache into which the prompt is read; None before the first prompt.
        tokens: the number of tokens of the prompt; 0 before the first prompt.
        available_bytes: how many bytes were free when the prompt was noted; None if it is not
            known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._device = device_of(model)
        self.cache: CompressedCache | None = None
        self.tokens = 0
        self.available_bytes: int | None = None

    def remember(self, cache: CompressedCache, tokens: int) -> None:
        """Record that `cache` reads a prompt of `tokens` tokens, and how much memory is free.

        Repeated calls for the same cache and number of tokens change nothing.
        """
        if self.cache is cache and self.tokens == tokens:
            return
        self.cache, self.tokens = cache, tokens
        self.available_bytes = free_bytes(self._device)

    @contextlib.contextmanager
    def explaining(self, advice: Callable[[], str]) -> Iterator[None]:
        """Replace any out-of-memory error within this block by one with advice.

        The cache that was given to `note` is emptied before the error is raised.

        Args:
            advice: returns the message of the error; it is called only if a prompt was noted.

        Raises:
            OutOfMemoryError: the block has run out of memory, on the host or on a device.
        """
        try:
            with out_of_memory_explained(
                lambda: advice() if self.tokens else "out of memory before a prompt was read"
            ):
                yield
        except OutOfMemoryError:
            if self.cache is not None:
                self.cache.reset()
            raise
