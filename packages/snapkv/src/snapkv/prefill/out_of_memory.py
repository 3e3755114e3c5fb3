"""Running out of memory in the middle of a prompt: what is left, and what is said."""

import contextlib
from collections.abc import Callable, Iterator

from transformers import PreTrainedModel

from snapkv.errors import OutOfMemoryError
from snapkv.hf.cache import CompressedCache
from snapkv.plan import free_bytes, out_of_memory_explained


class MemoryWatch:
    """The prompt that is being read, and what was free before it.

    Attributes:
        cache: where it goes; None before the first one.
        tokens: how many it has.
        available_bytes: free on the model's device when it began; None where that is not known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._device = model.device
        self.cache: CompressedCache | None = None
        self.tokens = 0
        self.available_bytes: int | None = None

    def note(self, cache: CompressedCache, tokens: int) -> None:
        """A prompt of that many tokens is being read; said again while it is, nothing changes."""
        if self.cache is cache and self.tokens == tokens:
            return
        self.cache, self.tokens = cache, tokens
        self.available_bytes = free_bytes(self._device)

    @contextlib.contextmanager
    def telling(self, advice: Callable[[], str]) -> Iterator[None]:
        """Give back what a prompt took for which there was no memory, and say what would fit.

        Raises:
            OutOfMemoryError: with the advice, where a prompt was being read.
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
