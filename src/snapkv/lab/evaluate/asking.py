"""A question of a run: a sample, asked of some methods, and the records of their answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from snapkv.app.answering import Answer
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact, Prefill
from snapkv.errors import OutOfMemoryError, PromptTooLongError
from snapkv.lab.evaluate.sample import Sample, Setting, Template
from snapkv.lab.evaluate.sharing import PromptReader
from snapkv.lab.evaluate.store import LOST, Record
from snapkv.lab.evaluate.task import Task
from snapkv.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Method:
    """A policy, and a way to read, under the name that tables give them."""

    label: str
    policy: Policy
    prefill: Prefill = field(default_factory=Exact)

    def describe(self) -> Record:
        """The policy's name and parameters, and how it reads where that is not exact."""
        reading = {} if self.prefill == Exact() else {"prefill": self.prefill.describe()}
        return self.policy.describe() | reading


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A sample, asked of some methods.

    Attributes:
        sample: what is asked.
        question: whether the vote sees it.
        methods: whose answers are wanted; they share a reading where they can.
        tries: how many workers have ended on it.
    """

    sample: Sample
    question: Setting
    methods: Sequence[Method]
    tries: int = 0

    @property
    def characters(self) -> int:
        """How long it is: what an answer takes grows with it."""
        return len(self.sample.context)

    def by_method(self) -> Iterator["Asked"]:
        """The same of one method at a time, once more."""
        for method in self.methods:
            yield replace(self, methods=(method,), tries=self.tries + 1)

    def lost(self) -> Iterator[Record]:
        """What is recorded where nothing could answer it."""
        for method in self.methods:
            yield self.record(method) | {"status": LOST}

    def record(self, method: Method) -> Record:
        """What the record of a method's answer begins with."""
        return {
            "sample": self.sample.name,
            "method": method.label,
            "question": self.question,
            "cell": self.sample.cell,
            "policy": method.describe(),
            "references": list(self.sample.references),
        }


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """Answers the questions of a task with a model.

    Attributes:
        loaded: model and tokenizer.
        task: what scores the answers.
        template: how a sample becomes a prompt, see `Sample.prompt`.
    """

    loaded: LoadedModel
    task: Task
    template: Template

    def records(self, asked: Asked) -> Iterator[Record]:
        """An answer of every method, or why there is none."""
        sample = asked.sample
        reader = PromptReader(
            self.loaded,
            sample.prompt(self.loaded.tokenizer, self.template, asked.question),
            sample.settings,
            [method.prefill for method in asked.methods],
        )
        for method in asked.methods:
            yield asked.record(method) | self._outcome(sample, method, reader)

    def _outcome(self, sample: Sample, method: Method, reader: PromptReader) -> Record:
        try:
            given = reader.answer(method.policy, method.prefill, sample.protection)
            return {"status": "ok"} | self._scored(sample, given)
        except PromptTooLongError:
            return {"status": "too long"}
        except OutOfMemoryError:
            pass  # the error holds what filled the memory until this block is left
        torch.cuda.empty_cache()  # does nothing where CUDA was not used
        return {"status": LOST}

    def _scored(self, sample: Sample, given: Answer) -> dict[str, Any]:
        prediction = given.text.removeprefix(sample.answer_start)
        return {
            "prediction": prediction,
            "score": self.task.score(sample, prediction),
            **costs(given),
        }


def costs(given: Answer) -> Record:
    """What an answer took."""
    return {
        "prompt_tokens": given.prompt_tokens,
        "new_tokens": given.new_tokens,
        "kept_tokens": given.cache.kept_tokens,
        "held_bytes": given.cache.held_bytes,
        "full_bytes": given.cache.full_bytes,
        "first_token_ms": given.first_token_ms,
        "token_ms": given.token_ms,
    }
