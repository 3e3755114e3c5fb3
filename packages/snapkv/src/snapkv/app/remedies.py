"""Which policy would have kept the full cache's answer: found by trying them on one reading.

The prompt is read once more. Each candidate compresses a copy of it, and the full cache's answer is
fed to that copy: the candidate keeps the answer if it would have chosen each of its tokens itself.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from snapkv.app.answering import generate_options, prompt_ids
from snapkv.app.models import LoadedModel
from snapkv.app.prompts import Prompt
from snapkv.app.recorded import RecordedPrompt, Recorder, record_prompt, record_prompt_twice
from snapkv.app.settings import GenerationSettings
from snapkv.errors import OutOfMemoryError
from snapkv.hf.cache import CompressedCache
from snapkv.plan import free_bytes, out_of_memory_explained, prompt_advice
from snapkv.policies import EvictingPolicy, FullCache, Policy
from snapkv.policies.kvzip import INSTRUCTION

_TOKENS_AT_ONCE = 64
"""Of the answer, so that their logits take little memory and a wrong candidate ends early."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What trying the candidates found."""

    keeper: int | None = None
    untold: str = ""


def first_that_keeps(
    loaded: LoadedModel,
    prompt: Prompt,
    settings: GenerationSettings,
    answer_ids: Sequence[int],
    candidates: Sequence[Policy],
    *,
    protect: Sequence[Sequence[int]] = (),
) -> Tried:
    """The first candidate whose answer would be the full cache's."""
    if settings.temperature:
        return Tried(untold=f"the answers are drawn, at temperature {settings.temperature}")
    if not candidates:
        return Tried()
    ids = prompt_ids(loaded, prompt, settings)
    advice = functools.partial(
        prompt_advice, loaded.model, ids.shape[1], free_bytes(loaded.model.device)
    )
    try:
        with out_of_memory_explained(advice):
            trial = _Trial.begin(loaded, prompt, settings, ids, answer_ids, candidates)
            return replace(trial, protect=protect).first(candidates)
    except OutOfMemoryError:
        return Tried(untold="there is no memory for one more reading of the prompt")


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A reading on which candidates are tried."""

    model: Any
    recorded: RecordedPrompt
    ids: Tensor
    answer_ids: Tensor
    processors: LogitsProcessorList
    protect: Sequence[Sequence[int]] = ()

    @classmethod
    def begin(
        cls,
        loaded: LoadedModel,
        prompt: Prompt,
        settings: GenerationSettings,
        ids: Tensor,
        answer_ids: Sequence[int],
        candidates: Sequence[Policy],
    ) -> "_Trial":
        """Read the prompt."""
        context = ids[:, : prompt.context_tokens(loaded.tokenizer)]
        if candidates[0].reads_twice:
            repeat = loaded.tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
            recorded = record_prompt_twice(
                loaded.model, context, candidates[0], instruction_ids=repeat
            )
        else:
            recorded = record_prompt(loaded.model, context, Recorder.for_policies(candidates))
        return cls(
            model=loaded.model,
            recorded=recorded,
            ids=ids,
            answer_ids=torch.tensor(answer_ids, device=ids.device),
            processors=_processors(loaded.model, ids, settings),
        )

    @torch.inference_mode()
    def first(self, candidates: Sequence[Policy]) -> Tried:
        """Try one after the other; the full cache itself first, which must keep its answer."""
        if not self._keeps(FullCache()):
            return Tried(untold="two of its tokens are too nearly as likely as others to tell")
        keepers = (place for place, policy in enumerate(candidates) if self._keeps(policy))
        return Tried(keeper=next(keepers, None))

    def _keeps(self, policy: Policy) -> bool:
        """Whether the policy would choose every token of the answer itself."""
        text = torch.cat([self.ids[0], self.answer_ids])
        start = self.ids.shape[1]
        cache = self.recorded.compressed(policy, protect=self.protect)
        for number, logits in enumerate(self._logits(cache)):
            processed = self.processors(text[None, : start + number], logits[None].float())
            if int(processed.argmax()) != int(self.answer_ids[number]):
                return False
        return True

    def _logits(self, cache: CompressedCache) -> Iterator[Tensor]:
        """(V,) behind the prompt and each token of the answer but the last, as they are needed."""
        before = self.recorded.last_logits
        hidden = self.ids[:, self.recorded.prompt_tokens :]
        if hidden.shape[1]:
            before = _read(self.model, cache, hidden)
        yield before[0, -1]
        one_by_one = isinstance(cache.policy, EvictingPolicy)
        for piece in torch.split(self.answer_ids[:-1], 1 if one_by_one else _TOKENS_AT_ONCE):
            if len(piece):
                yield from _read(self.model, cache, piece[None])[0]


def _read(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """Logits (1, N, V) behind each of the tokens, which are read in one pass."""
    cache.expect_tokens(ids)
    logits: Tensor = model(ids, past_key_values=cache).logits
    return logits


def _processors(model: Any, ids: Tensor, settings: GenerationSettings) -> LogitsProcessorList:
    """What `generate` does to the logits, with what the checkpoint suggests."""
    found: list[LogitsProcessorList] = []

    def decoding(
        model: Any, input_ids: Tensor, *, logits_processor: LogitsProcessorList, **_: Any
    ) -> Tensor:
        del model
        found.append(logits_processor)
        return input_ids

    take: Callable[..., Tensor] = decoding
    options = generate_options(model, settings)
    model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=take, **options)
    return found[0]
