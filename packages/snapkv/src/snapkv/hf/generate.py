"""Wrappers of a model's `generate` methods that tell a cache where the prompt ends.

The first forward pass may read a piece of the prompt (`prefill_chunk_size`), or the prompt and
drafts. The pass itself does not show which, and layers never see token ids. So some methods of the
model are wrapped on the instance: `generate` announces the length of the prompt to a
`CompressedCache`, and `prepare_inputs_for_generation` the token ids of every pass. Other caches are
passed through unchanged.

In ``model.generate(ids, past_key_values=CompressedCache(model))``, Python looks up `generate`
before the cache is made, so the unwrapped method runs. For this case `_prefill` announces the
prompt, and `_extract_generation_mode_kwargs` passes on the streamer. `_get_candidate_generator` is
called before drafts are read, and makes the model read the prompt first. If
`_valid_auto_compile_criteria` would let `generate` compile its decode steps, they are captured
instead, and `get_compiled_call` returns the replay.
"""

import contextlib
import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.prompt_state import PromptState
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf import forward_context, step_graph
from snapkv.hf.cache_argument import cache_among, passed, with_cache

INSTALLATION = "_snapkv_installation"
"""The attribute of a model that holds its `Installation`, so that both are copied together."""


def _generate(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Announce the length of the prompt to the `CompressedCache`, and run `generate`.

    A call without a compressed cache runs unchanged. Each wrapper in this module takes the model's
    own function as `own`, the model, and the arguments of the call.

    Raises:
        InvalidArgumentError: an argument of `generate` does not work with a compressed cache, or
            the policy needs token ids and only embeddings are passed.
        UnsupportedModelError: the model uses PEFT prompt or prefix tuning.
    """
    prompt_state = _prompt_state_of(kwargs)
    if prompt_state is None:
        return own(model, *args, **kwargs)
    _require_plain_prompt(model, args, kwargs)
    if prompt_state.looks_at_tokens and kwargs.get("inputs_embeds") is not None:
        raise wrong(
            "inputs_embeds",
            f"the method {prompt_state.policy.name} needs the ids of the tokens, but got only "
            "embeddings",
            "Pass input_ids instead of inputs_embeds",
        )
    end = _prompt_tokens(args, kwargs)
    if (ids := _prompt_ids(args, kwargs)) is not None:
        prompt_state.expect_text(ids, end, kwargs.get("attention_mask"))
    if piece := _option(model, args, kwargs, "prefill_chunk_size"):
        cache_among(kwargs).require_pieces(end, piece, kwargs.get("attention_mask"))
    try:
        with prompt_state.announced(end) if end else contextlib.nullcontext():
            return own(model, *args, **kwargs)
    finally:
        _forget_split(model, prompt_state)
        if steps := step_graph.running(cache_among(kwargs)):
            steps.close()


def _prepare_inputs(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare the inputs of a forward pass, and pass their token ids to the `CompressedCache`.

    Raises:
        UnsupportedModelError: the model's own code left the cache out to read all tokens again.
    """
    prompt_state = _prompt_state_of(kwargs)
    if prompt_state is None:
        return own(model, *args, **kwargs)
    if steps := step_graph.running(cache_among(kwargs)):
        if prompt_state.is_coming:
            steps.close()
        else:
            ids = args[0] if args else kwargs["input_ids"]
            steps.expect(kwargs.get("next_sequence_length") or ids.shape[1])
    # A pass that is read in two parts needs no mask for both together.
    splits = _is_split(model, prompt_state) and not prompt_state.seen_tokens
    with forward_context.step():
        inputs = own(model, *args, **(kwargs | passed(None) if splits else kwargs))
    token_ids = inputs.get("input_ids")
    if cache_among(inputs) is not cache_among(kwargs):
        inputs = _with_omitted_cache(model, inputs, cache_among(kwargs))
    if token_ids is not None:
        prompt_state.expect_tokens(token_ids)
        prompt_state.record_text(args[0] if args else kwargs["input_ids"])
    return inputs


def _with_omitted_cache(
    model: PreTrainedModel, inputs: dict[str, Any], cache: Any
) -> dict[str, Any]:
    """Return the inputs of a pass with the cache that the model's own code has left out.

    Phi-3 leaves the cache out to read all tokens again, once the text outgrows its short rotations.
    As long as the cache is empty, it can be used all the same.

    Raises:
        UnsupportedModelError: the cache has read tokens, or the model replaced it by another.
    """
    if cache.get_seq_length() or cache_among(inputs) is not None:
        limit = getattr(model.config, "original_max_position_embeddings", None)
        remedy = "Use the default cache of transformers for this model"
        if limit is not None:
            remedy = (
                f"Use a prompt and an answer of at most original_max_position_embeddings={limit:,} "
                "tokens, or read the longer text into an empty cache in one forward pass"
            )
        raise wrong(
            "model",
            f"{type(model).__name__} does not continue with the cache that it is given: it leaves "
            f"the {cache.get_seq_length():,} tokens in the cache and reads all of them again",
            remedy,
            UnsupportedModelError,
        )
    return with_cache(inputs, cache)


def _prefill(
    own: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: Any,
    **options: Any,
) -> Any:
    """Read the prompt, after announcing it to the cache if `_generate` has not done so.

    The pieces of a prompt run eagerly; only the decode steps after them are captured.

    Raises:
        CacheMismatchError: the batch has another size than the cache, or the cache has read another
            text.
        InvalidArgumentError: `use_cache` is off, or the mask has too few columns.
        UnsupportedModelError: the model has not read the whole prompt into the cache.
    """
    prompt_state = _prompt_state_of(model_kwargs)
    if prompt_state is None:
        return own(model, input_ids, generation_config, model_kwargs, **options)
    _require_use_cache(generation_config.use_cache)  # the checkpoint may have set it
    cache, mask = cache_among(model_kwargs), model_kwargs.get("attention_mask")
    cache.require_rows(len(input_ids))
    # After an error in an earlier call, the traceback may still hold its append buffers.
    cache.release_append_buffers()
    generation_config = copy.copy(generation_config)
    generation_config.disable_compile = True
    # The length of a mask that hides nothing and was therefore left out.
    masked = getattr(generation_config, "_mask_length", None) or 0
    end = max(masked, _prompt_tokens((input_ids,), model_kwargs))
    prompt_state.expect_text(input_ids, end, mask)
    announcement: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not prompt_state.is_announced:
        announcement = prompt_state.announced(end)
    with announcement, prompt_state.reading_text(input_ids):
        output = own(model, input_ids, generation_config, model_kwargs, **options)
        prompt_state.require_arrived()
    return output


def _candidates(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the model read the prompt in a pass of its own before the first drafts.

    The drafts must attend to the compressed prompt, which exists only after that pass. This
    replaces the `forward` of the model, in place, until the prompt has been read.

    Raises:
        SnapKVError: the prompt cannot be announced; see `PromptState.expect_prompt`.
    """
    model_kwargs = kwargs.get("model_kwargs") or {}
    if (prompt_state := _prompt_state_of(model_kwargs)) is not None:
        if not prompt_state.is_announced:
            prompt_state.expect_prompt(_prompt_tokens((kwargs["input_ids"],), model_kwargs))
        with _changing_forward:
            if not isinstance(vars(model).get("forward"), _PromptFirst):
                vars(model)["forward"] = _PromptFirst(model)
            vars(model)["forward"].waiting[id(prompt_state)] = prompt_state
    return own(model, *args, **kwargs)


_changing_forward = threading.Lock()


class _PromptFirst:
    """A replacement of a model's `forward` that reads a prompt and its drafts in two passes.

    It stays on the model until the prompts of all waiting caches have been read, in any thread.
    Then an earlier replacement of `forward` on the instance is put back.

    Args:
        model: the model, whose present `forward` is called for each pass.

    Attributes:
        previous: the `forward` that was set on the instance before; None if there was none.
        waiting: the prompt states of the caches whose prompts have not been read, by their ids.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.previous, self._forward = model, vars(model).get("forward"), model.forward
        self.waiting: weakref.WeakValueDictionary[int, PromptState] = weakref.WeakValueDictionary()
        functools.update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Read the prompt and then the drafts, and return the outputs of both as one.

        A pass of a cache that is not waiting is read as usual.

        Raises:
            UnsupportedModelError: attention weights are requested, which have no common shape.
        """
        prompt_state = _prompt_state_of(kwargs)
        if prompt_state is None or not _is_split(self._model, prompt_state):
            return self._forward(*args, **kwargs)
        _forget_split(self._model, prompt_state)
        ids = kwargs.get("input_ids")
        tokens = (kwargs["inputs_embeds"] if ids is None else ids).shape[1]
        if not (behind := prompt_state.tokens_behind(tokens)):
            return self._forward(**kwargs)
        if kwargs.get("output_attentions"):
            raise wrong(
                "output_attentions",
                "the attention weights of drafts cannot be returned, because they only include "
                "the tokens that were kept, but output_attentions is True",
                "Remove this argument, or generate without drafts",
                UnsupportedModelError,
            )
        first = self._forward(**_part(kwargs, 0, tokens - behind, tokens))
        cache_among(kwargs).crop(0)  # shortens layers with a sliding window for the next pass
        rest = self._forward(**_part(kwargs, tokens - behind, tokens, tokens))
        rest["logits"] = torch.cat([first.logits, rest.logits], dim=1)
        if first.get("hidden_states") is not None:
            pairs = zip(first.hidden_states, rest.hidden_states, strict=True)
            rest["hidden_states"] = tuple(torch.cat(pair, dim=1) for pair in pairs)
        return rest


def _forget_split(model: Any, prompt_state: PromptState) -> None:
    """Stop waiting for the prompt of a cache, and restore `forward` if no other cache waits."""
    with _changing_forward:
        split = vars(model).get("forward")
        if not isinstance(split, _PromptFirst):
            return
        split.waiting.pop(id(prompt_state), None)
        if split.waiting:
            return
        del vars(model)["forward"]
        if split.previous is not None:
            vars(model)["forward"] = split.previous


def _is_split(model: Any, prompt_state: PromptState) -> bool:
    """Return whether the next pass of this cache is read in two parts."""
    split = vars(model).get("forward")
    return isinstance(split, _PromptFirst) and id(prompt_state) in split.waiting


def _part(kwargs: dict[str, Any], start: int, stop: int, tokens: int) -> dict[str, Any]:
    """Return the arguments of `forward` for tokens `start` to `stop` of a pass.

    Args:
        kwargs: the arguments for all tokens of the pass.
        start: the first token of the part. Images and similar tensors go only into the part that
            starts at 0.
        stop: the token after the last one of the part.
        tokens: how many tokens the whole pass has.
    """
    own = dict(kwargs)
    for name, value in kwargs.items():
        if not isinstance(value, Tensor):
            continue
        if name == "attention_mask":
            own[name] = value[:, : value.shape[1] - tokens + stop]
        elif name == "inputs_embeds":
            own[name] = value[:, start:stop]
        elif name.endswith("_ids") or name == "cache_position":
            own[name] = value[..., start:stop]
        elif start:
            del own[name]
    if "logits_to_keep" in own:
        own["logits_to_keep"] = stop - start if start else 1
    return own


def _modes(
    own: Callable[..., Any], model: Any, custom_generate: Any, kwargs: Any, *modes: Any
) -> Any:
    """Pass the streamer to a custom decoding method that accepts one.

    transformers itself never passes a streamer to a custom decoding method.

    Args:
        own: the model's own method.
        model: the model.
        custom_generate: the decoding method, or its name, or None.
        kwargs: the arguments of `generate`.
        modes: further arguments of the method; the last one is the streamer.

    Returns:
        The arguments for the decoding method, by name.
    """
    arguments = own(model, custom_generate, kwargs, *modes)
    if modes[-1] is not None and callable(custom_generate) and _prompt_state_of(kwargs) is not None:
        streams = "streamer" in inspect.signature(custom_generate).parameters
        arguments |= {"streamer": modes[-1]} if streams else {}
    return arguments


def _generate_batch(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run continuous batching, but raise for a compressed cache, which it would silently ignore.

    Raises:
        InvalidArgumentError: a compressed cache was passed.
    """
    if _prompt_state_of(kwargs) is not None:
        raise wrong(
            "cache",
            "generate_batch always uses its own paged cache and cannot use a CompressedCache",
            "Use model.generate instead, or use the command `snapkv serve` to answer many requests",
        )
    return own(model, *args, **kwargs)


@contextlib.contextmanager
def _batching(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Run continuous batching with the model's own attention, because it checks its name."""
    installation = vars(model).get(INSTALLATION)
    unwrapped = contextlib.nullcontext() if installation is None else installation.unwrapped()
    with unwrapped, own(model, *args, **kwargs) as manager:
        yield manager


def _init_batching(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Restore the model's own attention, and create the manager of continuous batching.

    The manager outlives this call, so the attention is wrapped again when the next cache is made.
    """
    if installation := vars(model).get(INSTALLATION):
        installation.unwrap()
    return own(model, *args, **kwargs)


_AROUND: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    "prepare_inputs_for_generation": _prepare_inputs,
    "_prefill": _prefill,
    "_get_candidate_generator": _candidates,
    "_extract_generation_mode_kwargs": _modes,
    "_valid_auto_compile_criteria": step_graph.compiles,
    "get_compiled_call": step_graph.compiled,
    "generate_batch": _generate_batch,
    "continuous_batching_context_manager": _batching,
    "init_continuous_batching": _init_batching,
}
"""The wrapper of each method. It receives the model's own method, the model and the arguments."""


class _Announcing:
    """A wrapper that replaces one method of a model, and calls a function of `_AROUND` instead."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model = weakref.ref(model)
        self.__name__ = name
        self.__doc__ = self._own.__doc__

    @property
    def model(self) -> Any:
        """The model whose method is wrapped; None if the model has been deleted."""
        return self._model()

    @property
    def _own(self) -> Any:
        """The unwrapped function of the model's class."""
        return getattr(type(self.model), self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _AROUND[self.__name__](self._own, self.model, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the model's own method, without `self`."""
        signature = inspect.signature(self._own)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Announcing":
        """Return a wrapper for the copy of the model, or for the same model if it is not copied."""
        return _Announcing(memo.get(id(self.model), self.model), self.__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Announcing, (self.model, self.__name__)


def announce_prompts(model: PreTrainedModel) -> None:
    """Set a wrapper on the model for each of its methods that is named in `_AROUND`.

    Changes the model in place. A method that somebody else has set on the instance is not wrapped.
    """
    for name in _AROUND:
        method = vars(model).get(name)
        is_foreign = isinstance(method, _Announcing) and method.model is not model
        if hasattr(type(model), name) and (method is None or is_foreign):
            vars(model)[name] = _Announcing(model, name)


def stop_announcing(model: PreTrainedModel) -> None:
    """Remove the wrappers that `announce_prompts` has set on the model, in place."""
    for name in _AROUND:
        if isinstance(vars(model).get(name), _Announcing):
            del vars(model)[name]


def _prompt_state_of(kwargs: dict[str, Any]) -> PromptState | None:
    """Return the prompt state of the compressed cache among the arguments, or None without one.

    Raises:
        InvalidArgumentError: the compressed cache is inside an encoder-decoder cache.
    """
    cache = cache_among(kwargs)
    inside = getattr(cache, "self_attention_cache", None)
    if isinstance(getattr(inside, "prompt_state", None), PromptState):
        raise wrong(
            "cache",
            f"a decoder-only model has no cross attention, but got a {type(cache).__name__} that "
            "contains a CompressedCache",
            "Pass the CompressedCache directly",
        )
    prompt_state = getattr(cache, "prompt_state", None)
    return prompt_state if isinstance(prompt_state, PromptState) else None


def _prompt_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return how many tokens the cache will have seen at the end of the prompt; 0 if unknown.

    A mask that is longer than the ids means that only the new ids were passed, as `generate` does.
    """
    inputs = (_prompt_ids(args, kwargs), kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))
    return max((each.shape[1] for each in inputs if isinstance(each, Tensor)), default=0)


def _prompt_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the token ids that were passed to `generate`.

    They are its first argument, or else `inputs`, or else `input_ids`.

    Returns:
        (B, N) integers; None if there are none, or if they are not a tensor.

    Raises:
        InvalidArgumentError: the ids have no axis for the batch.
    """
    given = (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
    found = next((ids for ids in given if isinstance(ids, Tensor)), None)
    if found is not None and found.ndim < 2:
        problem = f"expected the shape (batch, tokens), but got {tuple(found.shape)}"
        raise wrong("input_ids", problem, "Pass input_ids[None] for a single prompt")
    return found


def _option(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return the value of an option of `generate`; None if it is not set anywhere.

    An argument of the call comes first, then a generation config that was passed, and then the
    generation config of the model.
    """
    configs = kwargs.get("generation_config"), *args[1:2], model.generation_config
    values = kwargs.get(name), *(getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def _require_plain_prompt(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if `generate` would read other tokens than those of the prompt, or use another cache.

    Raises:
        InvalidArgumentError: `token_healing` is on, or `cache_implementation` is set.
        UnsupportedModelError: the model uses PEFT prompt or prefix tuning.
    """
    _require_no_learned_tokens(model)
    _require_no_other_cache(kwargs)
    if _option(model, args, kwargs, "token_healing"):
        raise wrong(
            "token_healing",
            "this option cannot be used with a CompressedCache, because it changes the length of "
            "the prompt",
            "Remove this option, or heal the tokens of the prompt before you call model.generate",
        )


def _require_no_other_cache(kwargs: dict[str, Any]) -> None:
    """Raise if the call requests another kind of cache from transformers.

    Raises:
        InvalidArgumentError: `cache_implementation` is set.
    """
    name = kwargs.get("cache_implementation")
    name = name or getattr(kwargs.get("generation_config"), "cache_implementation", None)
    if name is not None:
        raise wrong(
            "cache_implementation",
            f"a CompressedCache cannot be used together with another cache, but got {name!r}",
            "Remove this argument. To keep the evicted tokens in the memory of the host, make the "
            "cache with recall='host'",
        )


def _require_no_learned_tokens(model: PreTrainedModel) -> None:
    """Raise if the model has an adapter that adds learned tokens to the prompt.

    PEFT does this in prompt tuning and prefix tuning. A cache could not distinguish the learned
    tokens from those of the prompt.

    Raises:
        UnsupportedModelError: the active adapter of the model adds learned tokens.
    """
    wrapping = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    for each in (model, wrapping):
        config = getattr(each, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            raise wrong(
                "model",
                "a CompressedCache only works with adapters that do not add tokens to the "
                f"prompt, such as LoRA, but got {type(config).__name__}",
                "Remove past_key_values, or use the model without this adapter",
                UnsupportedModelError,
            )


def _require_use_cache(use_cache: bool | None) -> None:
    """Raise if the model is not allowed to use a cache.

    Without it, `generate` would read all tokens again in every step.

    Raises:
        InvalidArgumentError: `use_cache` is off.
    """
    if not use_cache:
        raise wrong(
            "use_cache",
            "the value must be True with a CompressedCache, because otherwise every step would "
            f"read all tokens into the cache again, but got {use_cache}",
            "Set use_cache=True, or remove past_key_values",
        )
