"""Telling a cache where the prompt ends and which tokens come, which only `generate` knows.

The first forward pass may be a piece of the prompt (`prefill_chunk_size`), or the prompt and
drafts; no pass can tell which, and no layer ever sees token ids. So methods of the model are
wrapped on the instance: `generate` announces the prompt's length to a `CompressedCache`, and
`prepare_inputs_for_generation` the ids of the tokens of every pass. Other caches pass through.

In ``model.generate(ids, past_key_values=CompressedCache(model))`` Python has looked `generate` up
before there was a cache, and the model's own runs. For that `_prefill` announces what was not, and
`_extract_generation_mode_kwargs` passes a streamer on. `_get_candidate_generator` is called before
drafts are read, and sees that the prompt is read first. Where `_valid_auto_compile_criteria` lets
`generate` compile the steps, they are recorded, and `get_compiled_call` gives their replay.
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
from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.hf import forward_context, step_graph
from snapkv.hf.cache_argument import cache_among, passed, with_cache

INSTALLATION = "_snapkv_installation"
"""Where a model carries its `Installation`, so that it is copied and pickled with the model."""


def _generate(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell a `CompressedCache` how long the prompt is."""
    prompt_state = _prompt_state_of(kwargs)
    if prompt_state is None:
        return own(model, *args, **kwargs)
    _require_plain_prompt(model, args, kwargs)
    if prompt_state.looks_at_tokens and kwargs.get("inputs_embeds") is not None:
        raise InvalidArgumentError(
            f"inputs_embeds: expected the prompt as token ids, since {prompt_state.policy.name} "
            "looks at tokens, got embeddings; pass input_ids"
        )
    end = _prompt_tokens(args, kwargs)
    if (ids := _prompt_ids(args, kwargs)) is not None:
        prompt_state.expect_text(ids, end, kwargs.get("attention_mask"))
    if piece := _asked(model, args, kwargs, "prefill_chunk_size"):
        cache_among(kwargs).require_pieces(end, piece, kwargs.get("attention_mask"))
    try:
        with prompt_state.announced(end) if end else contextlib.nullcontext():
            return own(model, *args, **kwargs)
    finally:
        _forget_split(model, prompt_state)
        if steps := step_graph.running(cache_among(kwargs)):
            steps.close()


def _prepare_inputs(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell a `CompressedCache` which tokens will be read."""
    prompt_state = _prompt_state_of(kwargs)
    if prompt_state is None:
        return own(model, *args, **kwargs)
    if steps := step_graph.running(cache_among(kwargs)):
        if prompt_state.is_coming:
            steps.close()
        else:
            ids = args[0] if args else kwargs["input_ids"]
            steps.expect(kwargs.get("next_sequence_length") or ids.shape[1])
    # No mask is made of both parts.
    splits = _is_split(model, prompt_state) and not prompt_state.seen_tokens
    with forward_context.step():
        inputs = own(model, *args, **(kwargs | passed(None) if splits else kwargs))
    token_ids = inputs.get("input_ids")
    if cache_among(inputs) is not cache_among(kwargs):
        inputs = _with_dropped(model, inputs, cache_among(kwargs))
    if token_ids is not None:
        prompt_state.expect_tokens(token_ids)
        prompt_state.note_text(args[0] if args else kwargs["input_ids"])
    return inputs


def _with_dropped(model: PreTrainedModel, inputs: dict[str, Any], cache: Any) -> dict[str, Any]:
    """The inputs of a pass with the cache that the model's own code has left out of them.

    Where the model begins again (Phi-3 after the end of its short rotations), that is right while
    the cache is empty, too.
    """
    if cache.get_seq_length() or cache_among(inputs) is not None:
        limit = getattr(model.config, "original_max_position_embeddings", None)
        remedy = "use transformers' own cache for it"
        if limit is not None:
            remedy = (
                f"keep prompt and answer within original_max_position_embeddings={limit:,} tokens, "
                "or read the longer text into an empty cache at once"
            )
        raise UnsupportedModelError(
            f"model: expected one that goes on with the cache it is given, got "
            f"{type(model).__name__}, which leaves the {cache.get_seq_length():,} tokens it has "
            f"read and reads all again; {remedy}"
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
    """Announce the prompt where `generate` had no chance to.

    Its pieces are read as they are: only steps after it are recorded.
    """
    prompt_state = _prompt_state_of(model_kwargs)
    if prompt_state is None:
        return own(model, input_ids, generation_config, model_kwargs, **options)
    _require_use_cache(generation_config.use_cache)  # which may be the checkpoint's
    cache, mask = cache_among(model_kwargs), model_kwargs.get("attention_mask")
    cache.require_rows(len(input_ids))
    cache.leave_room()  # where an error has ended a call, and its traceback is held
    generation_config = copy.copy(generation_config)
    generation_config.disable_compile = True
    masked = getattr(generation_config, "_mask_length", None) or 0  # of one that hides nothing
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
    """Read the prompt in a pass of its own: the drafts behind it attend to what was kept of it."""
    given = kwargs.get("model_kwargs") or {}
    if (prompt_state := _prompt_state_of(given)) is not None:
        if not prompt_state.is_announced:
            prompt_state.expect_prompt(_prompt_tokens((kwargs["input_ids"],), given))
        with _changing_forward:
            if not isinstance(vars(model).get("forward"), _PromptFirst):
                vars(model)["forward"] = _PromptFirst(model)
            vars(model)["forward"].waiting[id(prompt_state)] = prompt_state
    return own(model, *args, **kwargs)


_changing_forward = threading.Lock()


class _PromptFirst:
    """The forward pass that ends a prompt, in two where it goes on behind it.

    It stands for a model's `forward` while prompts of any thread wait, and for what was in its
    place on the instance, if anything was.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.others, self._forward = model, vars(model).get("forward"), model.forward
        self.waiting: weakref.WeakValueDictionary[int, PromptState] = weakref.WeakValueDictionary()
        functools.update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **given: Any) -> Any:
        prompt_state = _prompt_state_of(given)
        if prompt_state is None or not _is_split(self._model, prompt_state):
            return self._forward(*args, **given)
        _forget_split(self._model, prompt_state)
        ids = given.get("input_ids")
        tokens = (given["inputs_embeds"] if ids is None else ids).shape[1]
        if not (behind := prompt_state.tokens_behind(tokens)):
            return self._forward(**given)
        if given.get("output_attentions"):
            raise UnsupportedModelError(
                "output_attentions: expected False where drafts are verified, whose weights are as "
                "wide as what was kept, got True; leave it out, or generate without drafts"
            )
        first = self._forward(**_part(given, 0, tokens - behind, tokens))
        cache_among(given).crop(0)  # layers with a window hold no more than the next pass needs
        rest = self._forward(**_part(given, tokens - behind, tokens, tokens))
        rest["logits"] = torch.cat([first.logits, rest.logits], dim=1)
        if first.get("hidden_states") is not None:
            pairs = zip(first.hidden_states, rest.hidden_states, strict=True)
            rest["hidden_states"] = tuple(torch.cat(pair, dim=1) for pair in pairs)
        return rest


def _forget_split(model: Any, prompt_state: PromptState) -> None:
    """The prompt was read, or will not be: after the last one `forward` is again what it was."""
    with _changing_forward:
        split = vars(model).get("forward")
        if not isinstance(split, _PromptFirst):
            return
        split.waiting.pop(id(prompt_state), None)
        if split.waiting:
            return
        del vars(model)["forward"]
        if split.others is not None:
            vars(model)["forward"] = split.others


def _is_split(model: Any, prompt_state: PromptState) -> bool:
    """Whether the next pass of this cache is read in two parts."""
    split = vars(model).get("forward")
    return isinstance(split, _PromptFirst) and id(prompt_state) in split.waiting


def _part(given: dict[str, Any], start: int, stop: int, tokens: int) -> dict[str, Any]:
    """What a pass over some of its tokens is given; images and the like with the first of them."""
    own = dict(given)
    for name, value in given.items():
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
    """Keep the streamer, with which `modes` ends.

    transformers passes none to a decoding method of one's own, even if it can stream.
    """
    given = own(model, custom_generate, kwargs, *modes)
    if modes[-1] is not None and callable(custom_generate) and _prompt_state_of(kwargs) is not None:
        streams = "streamer" in inspect.signature(custom_generate).parameters
        given |= {"streamer": modes[-1]} if streams else {}
    return given


def _generate_batch(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Continuous batching would pass over a cache in silence."""
    if _prompt_state_of(kwargs) is not None:
        raise InvalidArgumentError(
            "cache: expected none in generate_batch, which pages a cache of its own, got "
            "a CompressedCache; call generate, or serve many requests with `snapkv serve`"
        )
    return own(model, *args, **kwargs)


@contextlib.contextmanager
def _batching(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Continuous batching, which looks at the attention's name and has a cache of its own."""
    installation = vars(model).get(INSTALLATION)
    plainly = contextlib.nullcontext() if installation is None else installation.aside()
    with plainly, own(model, *args, **kwargs) as manager:
        yield manager


def _init_batching(own: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """A manager that goes on after this call: the model is as it was until there is a new cache."""
    if installation := vars(model).get(INSTALLATION):
        installation.lay_aside()
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
"""What runs around which methods of a model: given the model's own method and the model."""


class _Announcing:
    """A method of a model that tells a `CompressedCache` what it knows."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model = weakref.ref(model)
        self.__name__ = name
        self.__doc__ = self._own.__doc__

    @property
    def model(self) -> Any:
        """The model whose method it is."""
        return self._model()

    @property
    def _own(self) -> Any:
        """The method as the model's class has it."""
        return getattr(type(self.model), self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _AROUND[self.__name__](self._own, self.model, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own method, as a bound method has it."""
        signature = inspect.signature(self._own)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Announcing":
        """For the copy of the model that is being made, or for the same model outside of one."""
        return _Announcing(memo.get(id(self.model), self.model), self.__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Announcing, (self.model, self.__name__)


def announce_prompts(model: PreTrainedModel) -> None:
    """Make the model announce prompts and tokens; leaves methods that are its user's own."""
    for name in _AROUND:
        found = vars(model).get(name)
        others = isinstance(found, _Announcing) and found.model is not model
        if hasattr(type(model), name) and (found is None or others):
            vars(model)[name] = _Announcing(model, name)


def stop_announcing(model: PreTrainedModel) -> None:
    """Give the model back the methods of its class; leaves those that are its user's own."""
    for name in _AROUND:
        if isinstance(vars(model).get(name), _Announcing):
            del vars(model)[name]


def _prompt_state_of(kwargs: dict[str, Any]) -> PromptState | None:
    """What a compressed cache among the arguments is told of its reading; None for other caches."""
    cache = cache_among(kwargs)
    inside = getattr(cache, "self_attention_cache", None)
    if isinstance(getattr(inside, "prompt_state", None), PromptState):
        raise InvalidArgumentError(
            f"cache: expected the CompressedCache itself, since a decoder-only model has no cross "
            f"attention, got a {type(cache).__name__} around it; pass the CompressedCache"
        )
    prompt_state = getattr(cache, "prompt_state", None)
    return prompt_state if isinstance(prompt_state, PromptState) else None


def _prompt_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens up to the end of the prompt, those the cache has seen included; 0 if none are given.

    A mask longer than the ids means that only the new ids were passed, as in `generate` itself.
    """
    given = (_prompt_ids(args, kwargs), kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))
    return max((each.shape[1] for each in given if isinstance(each, Tensor)), default=0)


def _prompt_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What `generate` was given first, if it is a tensor."""
    ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    return ids if isinstance(ids, Tensor) else None


def _asked(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """What `generate` was told by that name: itself, in its configuration, or by the model's."""
    configs = kwargs.get("generation_config"), *args[1:2], model.generation_config
    told = kwargs.get(name), *(getattr(config, name, None) for config in configs)
    return next((each for each in told if each is not None), None)


def _require_plain_prompt(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what would leave the cache with something else than the prompt."""
    _require_no_learned_tokens(model)
    _require_no_other_cache(kwargs)
    if _asked(model, args, kwargs, "token_healing"):
        raise InvalidArgumentError(
            "token_healing: expected False with a CompressedCache, since healing changes the "
            "prompt's length, got True; heal the tokens before calling generate"
        )


def _require_no_other_cache(kwargs: dict[str, Any]) -> None:
    """Refuse the name of a cache of transformers, such as its offloaded one, beside a cache."""
    name = kwargs.get("cache_implementation")
    name = name or getattr(kwargs.get("generation_config"), "cache_implementation", None)
    if name is not None:
        raise InvalidArgumentError(
            f"cache_implementation: expected none with a CompressedCache, got {name!r}; leave it "
            "out, and pass recall='host' to the CompressedCache to hold evicted tokens in the "
            "host's memory"
        )


def _require_no_learned_tokens(model: PreTrainedModel) -> None:
    """Refuse PEFT's prompt and prefix tuning, whose tokens a cache cannot tell from the prompt."""
    wrapping = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    for each in (model, wrapping):
        config = getattr(each, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                "model: expected adapters that add no tokens, such as LoRA, with a "
                f"CompressedCache, got {type(config).__name__}; generate without past_key_values"
            )


def _require_use_cache(use_cache: bool | None) -> None:
    if not use_cache:
        raise InvalidArgumentError(
            "use_cache: expected True with a CompressedCache, since every step would be read into "
            f"it again, got {use_cache}; pass use_cache=True, or no past_key_values"
        )
