"""Telling a cache where the prompt ends, which only `model.generate` knows.

Inside `generate` the first forward pass may be a piece of the prompt (`prefill_chunk_size`) or the
prompt and unverified drafts (prompt lookup, assistant models); no forward pass can tell which. So
the model's `generate` is wrapped on the instance: it announces the prompt's length to a
`CompressedCache` and then runs unchanged. Other caches pass through.
"""

import contextlib
import inspect
import weakref
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.compressed import CompressedCache
from snapkv.errors import InvalidArgumentError


class AnnouncingGenerate:
    """`model.generate` that tells a `CompressedCache` how long the prompt is.

    Holds its model weakly, so that the model is freed as soon as nobody uses it, and is copied and
    pickled with its model.
    """

    __name__ = "generate"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self.__doc__ = type(model).generate.__doc__

    @property
    def model(self) -> PreTrainedModel:
        """The model that generates."""
        return self._model()

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own method, as a bound method has it."""
        signature = inspect.signature(type(self.model).generate)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `generate`."""
        model, cache = self.model, kwargs.get("past_key_values")
        announcement: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(cache, CompressedCache):
            _require_plain_prompt(model, kwargs)
            prompt_tokens = _prompt_tokens(args, kwargs)
            if prompt_tokens:
                announcement = cache.announced(prompt_tokens)
        with announcement:
            return type(model).generate(model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "AnnouncingGenerate":
        """For the copy of the model that is being made, or for the same model outside of one."""
        return AnnouncingGenerate(memo.get(id(self.model), self.model))

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew for the unpickled model."""
        return AnnouncingGenerate, (self.model,)


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
    """Refuse what would leave the cache with something else than the prompt.

    Token healing rewrites the prompt after its length was announced; without `use_cache` every step
    feeds the whole text again, into the cache all the same.
    """
    config = kwargs.get("generation_config") or model.generation_config
    if kwargs.get("use_cache", getattr(config, "use_cache", True)) is False:
        raise InvalidArgumentError(
            "use_cache: expected True with a CompressedCache, since every step would be read into "
            "it anew, got False; pass use_cache=True, or no past_key_values"
        )
    if kwargs.get("token_healing", getattr(config, "token_healing", False)):
        raise InvalidArgumentError(
            "token_healing: expected False with a CompressedCache, since healing changes the "
            "prompt's length, got True; heal the tokens before calling generate"
        )
