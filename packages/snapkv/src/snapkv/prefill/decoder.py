"""The decoder's layers, standing in for the way they read, and running out of memory meanwhile."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from snapkv.errors import OutOfMemoryError, UnsupportedModelError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.device_memory import free_bytes, out_of_memory_explained
from snapkv.hf.placement import device_of


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, in order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        list(part)
        for part in model.get_decoder().children()
        if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"model: expected a decoder with one list of {count} layers, got "
            f"{type(model).__name__} with {len(found)}; read its prompt with prefill_chunk_size"
        )
    return found[0]


@contextlib.contextmanager
def standing_in(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within this block these functions are the modules' forward."""
    before = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    if not all(map(_brings_to_device, before)):
        raise UnsupportedModelError(
            "model: expected layers with their own forward, got some that are wrapped already (an "
            "outer block of snapkv.prefill, or a library that is not accelerate); leave one of "
            "them out"
        )
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
    """Whether what stands for its forward is accelerate's hook, around its own."""
    hooked = getattr(module.forward, "func", None)
    return getattr(hooked, "__module__", "") == "accelerate.hooks"


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tokens of each row a call of the decoder reads."""
    given = (args[0] if args else None, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    return next((each.shape[1] for each in given if each is not None), 0)


class ReadEnough(Exception):  # noqa: N818 - no error
    """Raised out of a forward pass, what it was for being known; whoever began it catches it."""


def require_by_token(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
    """Refuse arguments of a layer that are not known to belong to tokens one by one."""
    odd = [f"argument {number}" for number, _ in enumerate(args, 2)]
    odd += [name for name, value in kwargs.items() if not _is_by_token(value, tokens)]
    if odd:
        raise UnsupportedModelError(
            f"model: expected layers whose arguments belong to one token each, got {odd[0]}, which "
            "cannot be split; read the prompt with prefill_chunk_size, and with sdpa attention"
        )


def _is_by_token(value: Any, tokens: int) -> bool:
    if isinstance(value, tuple):
        return all(_is_by_token(item, tokens) for item in value)
    if isinstance(value, Tensor):
        return value.ndim >= 2 and value.shape[2 if value.ndim == 4 else 1] == tokens
    return value is None or isinstance(value, bool | int | float | str | Cache)


def part_of(value: Any, start: int, stop: int) -> Any:
    """The part of a layer's argument that belongs to tokens `start` to `stop`.

    Masks have four axes, the queries along the third; in front of the tokens' own columns stand
    those of earlier turns. (B, T) masks and position ids, and (B, T, D) position embeddings have
    the tokens along the second.
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
    """What belongs to the tokens at (B, n) ascending places, of a layer's argument for one pass.

    `value` is as for `part_of`; a mask of four axes is (B or 1, H or 1, T, T).
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
    """The prompt that is being read, where it goes, and what was free before it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._device = device_of(model)
        self.cache: CompressedCache | None = None
        self.tokens = 0
        self.available_bytes: int | None = None  # None where that is not known

    def note(self, cache: CompressedCache, tokens: int) -> None:
        """A prompt of that many tokens is being read; said again while it is, nothing changes."""
        if self.cache is cache and self.tokens == tokens:
            return
        self.cache, self.tokens = cache, tokens
        self.available_bytes = free_bytes(self._device)

    @contextlib.contextmanager
    def telling(self, advice: Callable[[], str]) -> Iterator[None]:
        """Give back what a prompt took for which there was no memory, and say what would fit."""
        try:
            with out_of_memory_explained(
                lambda: advice() if self.tokens else "out of memory before a prompt was read"
            ):
                yield
        except OutOfMemoryError:
            if self.cache is not None:
                self.cache.reset()
            raise
