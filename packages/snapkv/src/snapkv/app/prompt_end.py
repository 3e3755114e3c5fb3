"""The end of a prompt: what a cache holds and a model expects, before anything is generated."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from snapkv.hf.cache import CompressedCache


@dataclass(frozen=True, kw_only=True)
class PromptEnd:
    """A prompt that was read, and nothing behind it.

    Attributes:
        cache: what was kept of the prompt; it goes on by itself.
        logits: (1, 1, V), of the token that comes next, as the model gives them.
    """

    cache: CompressedCache
    logits: Tensor

    def branch(self) -> "PromptEnd":
        """The same once more: what is read into one cache is not in the other."""
        return PromptEnd(cache=copy.copy(self.cache), logits=self.logits)


PromptEndSink = Callable[[PromptEnd], None]
"""Takes the end of a prompt."""


@contextlib.contextmanager
def telling_of_prompt_end(
    model: Any, cache: CompressedCache, prompt_tokens: int, on_prompt_end: PromptEndSink | None
) -> Iterator[None]:
    """Within this block, the forward pass that ends a prompt is told of, once.

    What is told of shares what is stored so far with the cache, which goes on as ever.

    Args:
        model: reads the prompt into `cache`, with no drafts behind it in the same pass.
        cache: of one row.
        prompt_tokens: tokens that the cache has seen when the prompt ends.
        on_prompt_end: told; None for nobody.
    """
    if on_prompt_end is None:
        yield
        return
    told = False

    def look(module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        nonlocal told
        del module, given
        own = named.get("past_key_values") is cache  # another thread may use the model, too
        if own and not told and cache.get_seq_length() == prompt_tokens:
            told = True
            logits = output.logits[:, -1:].clone()
            on_prompt_end(PromptEnd(cache=cache, logits=logits).branch())

    hook = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
