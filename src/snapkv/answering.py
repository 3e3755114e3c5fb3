"""Answering over a long prompt: generate, stream, time, and report what the cache held."""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from snapkv.cache import CacheReport, CompressedCache
from snapkv.errors import PromptTooLongError
from snapkv.models import LoadedModel
from snapkv.plan import free_bytes, out_of_memory_explained, prompt_advice
from snapkv.policies import Policy
from snapkv.prompts import Prompt
from snapkv.settings import GenerationSettings

TextSink = Callable[[str], None]
"""Takes the next piece of an answer."""

LayerSink = Callable[[int, int], None]
"""Takes how many layers have read the prompt, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, and what it took.

    Attributes:
        text: the answer, beginning with the prompt's `answer_start`.
        finish_reason: "stop" where the model ended the answer, "length" where it was cut off.
        policy: the method's name and its parameters.
        prompt_tokens: length of the prompt.
        new_tokens: tokens generated, an end-of-turn token included.
        first_token_ms: from handing over the prompt to the first token: reading the prompt,
            compressing the cache, and one choice.
        token_ms: per token after the first, the median; None where there is only one.
        cache: what the cache saw and held when the answer was complete.
    """

    text: str
    finish_reason: str
    policy: dict[str, Any]
    prompt_tokens: int
    new_tokens: int
    first_token_ms: float
    token_ms: float | None
    cache: CacheReport


def answer(
    loaded: LoadedModel,
    prompt: Prompt,
    policy: Policy,
    settings: GenerationSettings,
    *,
    on_text: TextSink | None = None,
    on_layer: LayerSink | None = None,
) -> Answer:
    """Read the prompt into a cache that the policy compresses, and generate the answer.

    Args:
        loaded: model and tokenizer.
        prompt: what the model continues.
        policy: what the cache keeps of the prompt.
        settings: length and sampling.
        on_text: called with every finished piece of the answer, `answer_start` first.
        on_layer: called each time a layer has begun to read the prompt.

    Raises:
        PromptTooLongError: prompt and answer need more positions than the model has.
        UnsupportedModelError: the model cannot be compressed correctly.
        OutOfMemoryError: the device is full; the message says what would fit.
    """
    model = loaded.model
    ids = prompt.token_ids(loaded.tokenizer).to(model.device)
    prompt_tokens = ids.shape[1]
    _require_positions(loaded.max_tokens, prompt_tokens, settings.max_new_tokens)
    cache = _WatchedCache(model, policy, on_layer)
    watch = _Stopwatch(loaded.tokenizer, on_text)
    if on_text:
        on_text(prompt.answer_start)
    advice = functools.partial(prompt_advice, model, prompt_tokens, free_bytes(model.device))
    with out_of_memory_explained(advice), _seeded(settings.seed, model.device):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            streamer=watch,
            **_generate_options(model, settings),
        )
    new_ids = output[0, prompt_tokens:].tolist()
    text = loaded.tokenizer.decode(new_ids, skip_special_tokens=True)
    return Answer(
        text=prompt.answer_start + text,
        finish_reason="stop" if new_ids[-1] in _end_ids(model) else "length",
        policy=policy.describe(),
        prompt_tokens=prompt_tokens,
        new_tokens=len(new_ids),
        first_token_ms=watch.first_token_ms,
        token_ms=watch.token_ms,
        cache=cache.report(),
    )


def _require_positions(max_tokens: int | None, prompt_tokens: int, max_new_tokens: int) -> None:
    if max_tokens is not None and prompt_tokens + max_new_tokens > max_tokens:
        raise PromptTooLongError(
            f"prompt: expected at most {max_tokens - max_new_tokens:,} tokens, since the model has "
            f"{max_tokens:,} positions and the answer may take {max_new_tokens:,} of them, got "
            f"{prompt_tokens:,}; shorten the documents, lower max_new_tokens, or choose a model "
            "with more positions"
        )


def _generate_options(model: Any, settings: GenerationSettings) -> dict[str, Any]:
    """Keyword arguments of `generate` that replace whatever the checkpoint suggests.

    One sequence, without beams, from a cache: that is what is streamed, timed and reported.
    """
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None}
    if settings.temperature:
        sampling = {"do_sample": True, "temperature": settings.temperature}
    elif model.generation_config.do_sample:
        sampling |= {"top_p": None, "top_k": None}
    if model.generation_config.pad_token_id is None:
        sampling["pad_token_id"] = next(iter(_end_ids(model)), 0)
    single = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
    return {"max_new_tokens": settings.max_new_tokens, **single, **sampling}


def _end_ids(model: Any) -> list[int]:
    """Tokens that end an answer."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from `seed`, and leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _WatchedCache(CompressedCache):
    """Tells how far through the layers the prompt has come."""

    def __init__(self, model: Any, policy: Policy, on_layer: LayerSink | None) -> None:
        super().__init__(model, policy)
        self._on_layer = on_layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._on_layer:
            self._on_layer(layer_idx + 1, len(self.layers))
            if layer_idx + 1 == len(self.layers):
                self._on_layer = None
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Stopwatch(TextStreamer):
    """Passes finished text on, and notes when every token arrived."""

    def __init__(self, tokenizer: Any, on_text: TextSink | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self._start = time.perf_counter()
        self._arrivals: list[float] = []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self._arrivals.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._on_text and text:
            self._on_text(text)

    @property
    def first_token_ms(self) -> float:
        return (self._arrivals[0] - self._start) * 1000

    @property
    def token_ms(self) -> float | None:
        steps = [later - earlier for earlier, later in itertools.pairwise(self._arrivals)]
        return statistics.median(steps) * 1000 if steps else None
