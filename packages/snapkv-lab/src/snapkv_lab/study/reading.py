"""A prompt and what the model answered to it from the full cache."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from snapkv.app.answering import continue_ids, prompt_ids
from snapkv.app.models import LoadedModel
from snapkv.hf.cache import CompressedCache
from snapkv.policies import FullCache
from snapkv_lab.evaluate.sample import Sample, Template


@dataclass(frozen=True, kw_only=True)
class AnsweredPrompt:
    """A prompt and its answer as tokens."""

    ids: Tensor
    prompt_tokens: int
    answer: str

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.ids.shape[1]

    def describe(self) -> dict[str, Any]:
        """What a result says of it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.tokens - self.prompt_tokens,
            "answer": self.answer,
        }


def read(loaded: LoadedModel, sample: Sample, template: Template) -> AnsweredPrompt:
    """Answer a sample from the full cache."""
    prompt = sample.prompt(loaded.tokenizer, template, "visible")
    ids = prompt_ids(loaded, prompt, sample.settings)
    cache = CompressedCache(loaded.model, FullCache())
    output = continue_ids(loaded, ids, cache, sample.settings)
    answer = loaded.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return AnsweredPrompt(ids=output, prompt_tokens=ids.shape[1], answer=answer)
