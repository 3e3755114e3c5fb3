"""The end of a prompt: what a cache holds and a model expects, before anything is generated."""

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
    """A prompt that was read, and nothing after it."""

    cache: CompressedCache  # what was kept of the prompt; it goes on by itself
    logits: Tensor  # (1, 1, V), of the token that comes next, as the model gives them

    def branch(self) -> "PromptEnd":
        """The same once more: what is read into one cache is not in the other."""
        return PromptEnd(cache=copy.copy(self.cache), logits=self.logits)


PromptEndSink = Callable[[PromptEnd], None]


@contextlib.contextmanager
def telling_of_prompt_end(
    model: Any, cache: CompressedCache, prompt_tokens: int, on_prompt_end: PromptEndSink | None
) -> Iterator[None]:
    """Within this block, the forward pass that ends a prompt is told of, once.

    The prompt's only row is read without drafts after it. What is told of shares what is stored so
    far with the cache, which goes on as ever.
    """
    if on_prompt_end is None:
        yield
        return
    told = False

    def look(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        nonlocal told
        del module, given
        own = cache_among(named) is cache  # another thread may use the model, too
        if own and not told and cache.get_seq_length() == prompt_tokens:
            told = True
            logits = output.logits[:, -1:].clone()
            on_prompt_end(PromptEnd(cache=cache, logits=logits).branch())

    hook = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
