"""Which policy would have kept the full cache's answer: found by trying them on one reading.

The prompt is read once more. Each candidate compresses a copy of it, and the full cache's answer is
fed to that copy: the candidate keeps the answer if it would have chosen each of its tokens itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from snapkv.app.answering import generate_options, prompt_ids
from snapkv.app.models import LoadedModel
from snapkv.app.observing import RecordedPrompt, Recorder, record_prompt, record_prompt_twice
from snapkv.app.prompts import Prompt
from snapkv.app.settings import GenerationSettings
from snapkv.errors import OutOfMemoryError, UnsupportedModelError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.kvzip import instruction_of
from snapkv.plan import prompt_memory_explained
from snapkv.policies import EvictingPolicy, FullCache, Policy
from snapkv.storage.bits import Quantize

_TOKENS_AT_ONCE = 64
"""Of the answer, so that their logits take little memory and a wrong candidate ends early."""


@dataclass(frozen=True)
class Candidate:
    """What a cache would keep, and in how few bits; None for as it came."""

    policy: Policy
    quantize: Quantize | None = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What trying the candidates found."""

    keeper: int | None = None  # the place of the first that keeps the answer; None where none does
    untold: str = ""  # why nothing could be tried; empty where the candidates were tried


def first_that_keeps(
    loaded: LoadedModel,
    prompt: Prompt,
    settings: GenerationSettings,
    answer_ids: Sequence[int],
    candidates: Sequence[Candidate],
    *,
    protect: Sequence[Sequence[int]] = (),
) -> Tried:
    """The first candidate whose answer would be the full cache's, `answer_ids`.

    The most welcome stands first; all or none of them read a context twice. `protect` are half-open
    spans of positions that stay.
    """
    if settings.temperature:
        return Tried(untold=f"the answers are drawn, at temperature {settings.temperature}")
    if not candidates:
        return Tried()
    ids = prompt_ids(loaded, prompt, settings)
    try:
        with prompt_memory_explained(loaded.model, ids.shape[1]), torch.inference_mode():
            context = ids[:, : prompt.context_tokens(loaded.tokenizer)]
            trial = _Trial(
                recorded=_read(loaded, context, [each.policy for each in candidates]),
                ids=ids,
                answer_ids=torch.tensor(answer_ids, device=ids.device),
                processors=_processors(loaded.model, ids, settings),
                protect=protect,
            )
            if not trial.keeps_in_full():
                return Tried(untold="two of its tokens are too nearly as likely as others to tell")
            keepers = (place for place, each in enumerate(candidates) if trial.keeps(each))
            return Tried(keeper=next(keepers, None))
    except OutOfMemoryError:
        return Tried(untold="there is no memory for one more reading of the prompt")
    except UnsupportedModelError:
        return Tried(untold="a prompt of this model is not recorded for several methods")


def _read(loaded: LoadedModel, ids: Tensor, policies: Sequence[Policy]) -> RecordedPrompt:
    """Read what stands before an answer, or a hidden question, for all policies."""
    if policies[0].reads_context:
        repeat = instruction_of(loaded.tokenizer)
        return record_prompt_twice(loaded.model, ids, policies[0], instruction_ids=repeat)
    return record_prompt(loaded.model, ids, Recorder.for_policies(policies))


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A reading on which candidates are tried."""

    recorded: RecordedPrompt  # the prompt, or of a hidden question what stands before it
    ids: Tensor  # (1, T) int64, all of the prompt
    answer_ids: Tensor  # (N,) int64, the answer that is to be kept
    processors: LogitsProcessorList  # change the logits of a token as `generate` does
    protect: Sequence[Sequence[int]]  # spans that stay in every candidate's cache

    def keeps(self, candidate: Candidate) -> bool:
        """Whether it would choose every token of the answer itself."""
        ways = {"protect": self.protect, "quantize": candidate.quantize}
        return self._chooses(self.recorded.compressed(candidate.policy, **ways))

    def keeps_in_full(self) -> bool:
        """Whether the full cache would, read like this."""
        return self._chooses(self.recorded.compressed(FullCache()))

    def _chooses(self, cache: CompressedCache) -> bool:
        text = torch.cat([self.ids[0], self.answer_ids])
        start = self.ids.shape[1]
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
            before = self._read(cache, hidden)
        yield before[0, -1]
        one_by_one = isinstance(cache.policy, EvictingPolicy) or cache.options["quantize"]
        for piece in torch.split(self.answer_ids[:-1], 1 if one_by_one else _TOKENS_AT_ONCE):
            if len(piece):
                yield from self._read(cache, piece[None])[0]

    def _read(self, cache: CompressedCache, ids: Tensor) -> Tensor:
        """Logits (1, N, V) behind each of the tokens, which are read in one pass."""
        cache.expect_tokens(ids)
        logits: Tensor = self.recorded.model(ids, **passed(cache)).logits
        return logits


def _processors(model: Any, ids: Tensor, settings: GenerationSettings) -> LogitsProcessorList:
    """What `generate` does to the logits, with what the checkpoint suggests."""
    found: list[LogitsProcessorList] = []

    def decoding(
        model: Any, input_ids: Tensor, *, logits_processor: LogitsProcessorList, **_: Any
    ) -> Tensor:
        found.append(logits_processor)
        return input_ids

    take: Callable[..., Tensor] = decoding
    options = generate_options(model, settings)
    model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=take, **options)
    return found[0]
