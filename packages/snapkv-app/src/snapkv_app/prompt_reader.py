"""Read a prompt one time for all methods that select tokens at its end."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from snapkv.errors import OutOfMemoryError, PromptTooLongError, UnsupportedModelError
from snapkv.hf.device_memory import free_bytes, out_of_memory_explained
from snapkv.hf.placement import device_of
from snapkv.policies import Policy
from snapkv.prefill import SharedReading
from snapkv.prefill.shared import shared_bytes
from snapkv.storage.bits import KVCodes
from snapkv_app.answering import Answer, answer, prompt_ids
from snapkv_app.models import LoadedModel
from snapkv_app.prefills import Exact, Prefill
from snapkv_app.prompt_end import PromptEnd
from snapkv_app.prompts import Prompt
from snapkv_app.protection import Protection
from snapkv_app.settings import GenerationSettings

_MOST_OF_FREE = 0.4
"""The fraction of the free memory for a shared prefill; caches and answers need the rest."""


@dataclass(frozen=True, kw_only=True)
class _ReadBefore(Prefill):
    """An exact prefill whose forward pass has already been computed."""

    name: ClassVar[str] = "exact"

    reading: SharedReading

    def installed(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return self.reading.given()


class PromptReader:
    """A reader of one prompt for several methods, which share the prefill if they can.

    The shared prefill is computed when the first method with exact prefill answers. Each method
    reads the prompt by itself if only one of them has exact prefill, if the model does not support
    a shared prefill, or if the memory is too small for it.

    Args:
        loaded: the model and its tokenizer.
        prompt: the prompt of all methods.
        settings: how answers are generated.
        ways: the prefill of every method that will answer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: Prompt,
        settings: GenerationSettings,
        ways: Sequence[Prefill],
    ) -> None:
        self._loaded, self._prompt, self._settings = loaded, prompt, settings
        self._shares = list(ways).count(Exact()) > 1
        self._shared: SharedReading | None = None

    def answer(
        self,
        policy: Policy,
        way: Prefill,
        protection: Protection,
        ends: list[PromptEnd] | None = None,
        quantize: KVCodes | None = None,
    ) -> Answer:
        """Generate the answer of one method.

        The time of a shared prefill is added to every answer, because every method alone would have
        needed it. If an answer after the shared prefill runs out of memory, the shared prefill is
        deleted, and this method and all later ones read the prompt by themselves.

        Args:
            policy: selects the tokens to keep.
            way: the prefill.
            protection: the tokens of the prompt that are always kept.
            ends: an empty list to which the `PromptEnd` of this method is appended; None for none.
            quantize: the codes that quantize stored keys and values; None for the dtype of the
                model.

        Raises:
            PromptTooLongError: prompt and answer need more positions than the model has.
            InvalidArgumentError: the policy cannot compress this prompt, or protected tokens do not
                occur in it or do not fit into the budget.
            UnsupportedModelError: the model's cache cannot be compressed.
            OutOfMemoryError: the device is full, also without the shared prefill.
        """
        read = partial(
            answer,
            self._loaded,
            self._prompt,
            policy,
            self._settings,
            protection=protection,
            quantize=quantize,
            on_prompt_end=None if ends is None else ends.append,
        )
        if way == Exact() and (shared := self._reading()) is not None:
            try:
                return read(prefill=_ReadBefore(reading=shared)).later(shared.read_ms)
            except OutOfMemoryError:
                pass  # the error holds what filled the memory until this block is left
            self._shares = False
            self._shared = shared = None
            if ends:
                ends.clear()
            torch.cuda.empty_cache()  # does nothing where CUDA was not used
        return read(prefill=way)

    def reusing_prefill(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which the shared prefill replaces reading the prompt.

        This computes the shared prefill unless that was done before. The context manager does
        nothing if every method reads the prompt by itself.

        Raises:
            InvalidArgumentError: there is no token before or after the hidden question.
        """
        shared = self._reading()
        return contextlib.nullcontext() if shared is None else shared.given()

    def _reading(self) -> SharedReading | None:
        """Return the shared prefill, which the first call computes and stores.

        None if every method reads the prompt by itself. Once it is None, it stays None.

        Raises:
            InvalidArgumentError: there is no token before or after the hidden question.
        """
        if self._shares and self._shared is None:
            self._shared = self._read()
            self._shares = self._shared is not None
        return self._shared

    def _read(self) -> SharedReading | None:
        """Read the prompt for all methods; None if they must read it by themselves.

        The reasons are that the model does not support it, that the memory is too small, and that
        the prompt is too long, which `answer` then reports.

        Raises:
            InvalidArgumentError: there is no token before or after the hidden question.
        """
        model, prompt = self._loaded.model, self._prompt
        with contextlib.suppress(PromptTooLongError, OutOfMemoryError, UnsupportedModelError):
            ids = prompt_ids(self._loaded, prompt, self._settings)
            context = ids[:, : prompt.context_tokens(self._loaded.tokenizer)]
            free = free_bytes(device_of(model))
            if free is not None and shared_bytes(model, context.shape[1]) > _MOST_OF_FREE * free:
                return None
            with out_of_memory_explained(lambda: ""):
                return SharedReading(model, context)
        torch.cuda.empty_cache()  # does nothing where CUDA was not used
        return None
