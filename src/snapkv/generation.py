"""Telling a cache where the prompt ends, which only `model.generate` knows.

Inside `generate` the first forward pass may be a piece of the prompt (`prefill_chunk_size`) or the
prompt and unverified drafts (prompt lookup, assistant models); no forward pass can tell which. So
the model's `generate` is wrapped on the instance: it announces the prompt's length to a
`CompressedCache` and then runs unchanged. Other caches pass through.
"""

import functools
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.compressed import CompressedCache
from snapkv.errors import InvalidArgumentError


class AnnouncingGenerate:
    """`model.generate` that tells a `CompressedCache` how long the prompt is."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `generate`."""
        cache = kwargs.get("past_key_values")
        if isinstance(cache, CompressedCache):
            _require_plain_prompt(self.model, kwargs)
            prompt_tokens = _prompt_tokens(args, kwargs)
            if prompt_tokens:
                cache.expect_prompt(prompt_tokens)
        return type(self.model).generate(self.model, *args, **kwargs)


def announce_prompts(model: PreTrainedModel) -> None:
    """Make `model.generate` announce its prompts; does nothing the second time."""
    if hasattr(type(model), "generate") and "generate" not in vars(model):
        vars(model)["generate"] = AnnouncingGenerate(model)


def _prompt_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens up to the end of the prompt, those the cache has seen included; 0 if none are given.

    A mask longer than the ids means that only the new ids were passed, as in `generate` itself.
    """
    ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    lengths = [
        tensor.shape[1]
        for tensor in (ids, kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))
        if isinstance(tensor, Tensor)
    ]
    return max(lengths, default=0)


def _require_plain_prompt(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Refuse token healing, which rewrites the prompt after its length was announced."""
    config = kwargs.get("generation_config") or model.generation_config
    if kwargs.get("token_healing", getattr(config, "token_healing", False)):
        raise InvalidArgumentError(
            "token_healing: expected False with a CompressedCache, since healing changes the "
            "prompt's length, got True; heal the tokens before calling generate"
        )
