"""Report the end of a prompt: the cache and the logits before any token is generated."""

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
    """A cache that has read a prompt and nothing after it, with the logits for the next token."""

    cache: CompressedCache  # the compressed prompt; an independent copy
    logits: Tensor  # (1, 1, V), for the next token

    def branch(self) -> "PromptEnd":
        """Return an independent copy, whose cache can read tokens without changing this one."""
        return PromptEnd(cache=copy.copy(self.cache), logits=self.logits)


PromptEndSink = Callable[[PromptEnd], None]


@contextlib.contextmanager
def telling_of_prompt_end(
    model: Any, cache: CompressedCache, prompt_tokens: int, on_prompt_end: PromptEndSink | None
) -> Iterator[None]:
    """Call `on_prompt_end` when the model has read the end of the prompt within this block.

    It is called at most one time, with a `PromptEnd` whose cache is an independent copy. The caller
    must read a prompt of one row, without drafts after it.

    Args:
        model: the model.
        cache: the cache that reads the prompt; passes with other caches are ignored.
        prompt_tokens: the length of `cache` at the end of the prompt.
        on_prompt_end: the function to call; None does nothing.
    """
    if on_prompt_end is None:
        yield
        return
    is_reported = False

    def look(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        nonlocal is_reported
        del module, given
        own = cache_among(named) is cache  # other threads may use the model
        if own and not is_reported and cache.get_seq_length() == prompt_tokens:
            is_reported = True
            logits = output.logits[:, -1:].clone()
            on_prompt_end(PromptEnd(cache=cache, logits=logits).branch())

    hook = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
