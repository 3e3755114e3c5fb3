"""Read a prompt one time, and compress its cache with several policies.

Reading a prompt takes almost all the time, and every policy starts from the same full cache. So the
prompt is read with a policy that keeps every token and records each layer. Each policy is then
called with the recorded layers, as a prefill would call it. The caches equal those of real
compressed prefills bit for bit.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from snapkv.cache.hybrid import HybridLayer
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.spans import protected_slots
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.hf.placement import device_of
from snapkv.kvzip import read_layers
from snapkv.policies import Policy, PromptLayer, Selection
from snapkv.policies.base import Need
from snapkv_app.models import LoadedModel

Seen = TypeVar("Seen")

_SHOWN: frozenset[Need] = frozenset({"rotation", "output_weight", "token_ids"})
"""The needs of policies that a recorded `PromptLayer` meets."""


@dataclass(frozen=True, kw_only=True)
class RecordingPolicy(Policy):
    """A policy that keeps every token, and adds every layer that it is called with to `layers`."""

    name: ClassVar[str] = "recorder"

    recorded_queries: int  # the number of last queries to record, enough for every later policy
    recorded_parts: frozenset[Need] = _SHOWN  # what the later policies need of the model
    layers: list[PromptLayer] = field(default_factory=list)

    @property
    def query_tokens(self) -> int:
        return self.recorded_queries

    @property
    def needs(self) -> frozenset[Need]:
        return self.recorded_parts

    def select(self, layer: PromptLayer) -> Selection | None:
        self.layers.append(layer)
        return None


@dataclass(frozen=True, kw_only=True)
class _Observer(RecordingPolicy):
    """A policy that calls `look` with every layer, so that only one layer is stored in full."""

    name: ClassVar[str] = "observer"

    look: Callable[[PromptLayer], None]

    def select(self, layer: PromptLayer) -> Selection | None:
        self.look(layer)
        return None


def observed(
    loaded: LoadedModel,
    ids: Tensor,
    query_tokens: int,
    look: Callable[[PromptLayer], Seen],
) -> dict[int, Seen]:
    """Read a prompt in one pass, and call a function with each compressed layer.

    Args:
        loaded: the model.
        ids: (1, S) int64, the S tokens of the prompt, on any device.
        query_tokens: the number of last queries that `look` needs.
        look: called with each layer, which contains all keys, values and the last queries.

    Returns:
        The results of `look`, by the index of the layer in the model. Layers that cannot be
        compressed, such as sliding windows, are missing.

    Raises:
        UnsupportedModelError: the model's cache cannot be compressed.
    """
    seen: dict[int, Seen] = {}

    def note(layer: PromptLayer) -> None:
        seen[layer.layer_idx] = look(layer)

    observer = _Observer(look=note, recorded_queries=query_tokens, recorded_parts=frozenset())
    _read(loaded.model, ids.to(device_of(loaded.model)), observer)
    return seen


@torch.inference_mode()
def _read(model: Any, ids: Tensor, recorder: RecordingPolicy) -> tuple[CompressedCache, Tensor]:
    """Read a prompt in one forward pass with the full cache, and let `recorder` see every layer.

    Returns:
        The cache, and the logits for the token after the prompt, (1, 1, V).

    Raises:
        UnsupportedModelError: the model's cache cannot be compressed.
    """
    cache = CompressedCache(model, recorder)
    cache.expect_tokens(ids)
    return cache, model(ids, **passed(cache), logits_to_keep=1).logits


@dataclass(frozen=True, kw_only=True)
class RecordedPrompt:
    """A prompt that a model has read with full attention, with all keys and values."""

    model: Any
    layers: Sequence[PromptLayer]  # the layers that can be compressed, as policies receive them
    last_logits: Tensor  # (1, 1, V), after the prompt; no policy changes them
    others: Mapping[int, Any] = field(default_factory=dict)  # all other layers by their index
    question_tokens: int | None = None  # see `CompressedCache.expect_question`

    @property
    def prompt_tokens(self) -> int:
        """T, the number of tokens of the prompt."""
        return self.layers[0].keys.shape[2]

    def compressed(self, policy: Policy, **options: Any) -> CompressedCache:
        """Build the cache that a prefill with `policy` would give; the recording is not changed.

        Args:
            policy: selects the tokens to keep.
            options: further keyword arguments of `CompressedCache`, such as `quantize`.

        Raises:
            InvalidArgumentError: the policy needs more queries than were recorded, or cannot
                compress this prompt, or an option is not valid.
        """
        cache = CompressedCache(self.model, policy, **options)
        cache.expect_prompt(self.prompt_tokens)
        cache.expect_question(self.question_tokens)
        for index, other in self.others.items():
            own = cache.layers[index]
            if isinstance(own, HybridLayer):
                own.take_other_states(other)
            else:
                cache.layers[index] = copy.deepcopy(other)
        for layer, shown in zip(cache.prompt_state.layers, self._filling(cache), strict=True):
            cache.prompt_state.chooser.offer(layer, shown)
        return cache

    def _filling(self, cache: CompressedCache) -> Iterator[PromptLayer]:
        """Fill each layer of `cache`, and yield the `PromptLayer` for the cache's policy.

        A layer is only filled when the caller asks for it, so that one layer at a time is stored in
        full.

        Raises:
            InvalidArgumentError: the policy needs more queries than were recorded.
        """
        policy = cache.prompt_state.policy
        for layer, states in zip(cache.prompt_state.layers, self.layers, strict=True):
            layer.update(states.keys, states.values)
            if "token_ids" in policy.needs and states.token_ids is not None:
                layer.remember_ids(states.token_ids)
            queries, spans = self._last_queries(states, policy), layer.protect
            place = self.prompt_tokens, states.pad_tokens
            yield replace(
                states,
                queries=queries,
                token_cost=functools.partial(layer.token_cost, queries.shape[1]),
                protected=None if spans is None else protected_slots(layer, spans, *place),
            )

    def _last_queries(self, states: PromptLayer, policy: Policy) -> Tensor:
        """Return the last queries of a layer, as many as `policy` needs.

        Returns:
            (1, Hq, W, D), the last `policy.query_tokens` queries, or all if the prompt is shorter.

        Raises:
            InvalidArgumentError: the policy needs more queries than were recorded.
        """
        wanted = min(policy.query_tokens, self.prompt_tokens)
        recorded = states.queries.shape[2]
        if wanted > recorded:
            raise wrong(
                "policy",
                f"the policy {policy!r} needs {wanted} recorded queries, but got {recorded}",
                "Record more queries",
            )
        return states.queries[:, :, recorded - wanted :]


def record_prompt(model: Any, ids: Tensor, recorder: RecordingPolicy) -> RecordedPrompt:
    """Read a prompt with the full cache, and record all layers.

    Args:
        model: the model.
        ids: (1, T) int64, the tokens of the prompt, on the device of the model.
        recorder: records the layers; the caller must pass a new one, whose `layers` the result
            shares.

    Raises:
        UnsupportedModelError: the model's cache cannot be compressed, or the model has latent
            attention, whose heads share one stored state.
    """
    cache, logits = _read(model, ids, recorder)
    others = _other_layers(cache, recorder.layers)
    return RecordedPrompt(model=model, layers=recorder.layers, last_logits=logits, others=others)


def _other_layers(cache: CompressedCache, shown: Iterable[PromptLayer]) -> dict[int, Any]:
    """Return the layers that cannot be compressed, such as sliding windows, by their index.

    Raises:
        UnsupportedModelError: the model has latent attention.
    """
    if any(layer.stored_heads is not None for layer in shown):
        raise wrong(
            "model",
            "for a model with latent attention, each method needs a separate reading of the prompt",
            "Read the prompt again for each of the methods",
            UnsupportedModelError,
        )
    return {
        index: layer
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, HybridLayer) or not isinstance(layer, CompressedLayer)
    }


@torch.inference_mode()
def record_prompt_twice(
    model: Any, ids: Tensor, policy: Policy, *, instruction_ids: Sequence[int]
) -> RecordedPrompt:
    """Record all layers of a prompt that the model reads and then repeats.

    Policies that read prompts twice, such as `KVzip`, can compress the recording.

    Args:
        model: the model.
        ids: (1, T) int64, the tokens of the prompt, on the device of the model.
        policy: a policy that reads prompts twice, with the same needs as the later ones; see
            `snapkv.kvzip`.
        instruction_ids: the tokens that ask the model to repeat the prompt.

    Raises:
        InvalidArgumentError: the policy does not read prompts twice, or cannot read this one.
        UnsupportedModelError: the model's cache cannot be compressed, or the model has latent
            attention.
    """
    cache = CompressedCache(model, policy)
    layers = read_layers(model, ids, cache, instruction_ids=instruction_ids)
    cache.crop(-1)  # the last token is read again, for its logits
    cache.expect_prompt(ids.shape[1] + 1)  # and nothing is to be dropped after it
    logits = model(ids[:, -1:], **passed(cache)).logits
    others = _other_layers(cache, layers)
    return RecordedPrompt(model=model, layers=layers, last_logits=logits, others=others)
