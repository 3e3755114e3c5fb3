"""The end of a prompt: the cache and the next-token logits before anything is generated."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import cache_among


@dataclass(frozen=True, kw_only=True)
class PromptEnd:
    """A cache that has read a prompt and nothing after it."""

    cache: CompressedCache  # the compressed prompt; an independent copy
    logits: Tensor  # (1, 1, V), for the next token

    def branch(self) -> "PromptEnd":
        """Return an independent copy: reading into one does not change the other."""
        return PromptEnd(cache=copy.copy(self.cache), logits=self.logits)


PromptEndSink = Callable[[PromptEnd], None]


@contextlib.contextmanager
def telling_of_prompt_end(
    model: Any, cache: CompressedCache, prompt_tokens: int, on_prompt_end: PromptEndSink | None
) -> Iterator[None]:
    """Call `on_prompt_end` once within this block, at the end of the prompt.

    The prompt must have one row and no drafts after it. The reported cache shares stored tensors
    with the cache in use, which continues as usual.
    """
    if on_prompt_end is None:
        yield
        return
    told = False

    def look(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        nonlocal told
        del module, given
        own = cache_among(named) is cache  # other threads may use the model
        if own and not told and cache.get_seq_length() == prompt_tokens:
            told = True
            logits = output.logits[:, -1:].clone()
            on_prompt_end(PromptEnd(cache=cache, logits=logits).branch())

    hook = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
