"""A question of a run: a sample, asked of some methods, and the records of their answers."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from snapkv.app.answering import Answer
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact, Prefill
from snapkv.errors import OutOfMemoryError, PromptTooLongError
from snapkv.lab.evaluate.conversing import Later, converse
from snapkv.lab.evaluate.sample import Conversation, Sample, Setting, Template
from snapkv.lab.evaluate.sharing import PromptReader
from snapkv.lab.evaluate.store import LOST, Key, Record, Store
from snapkv.lab.evaluate.task import Task
from snapkv.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Method:
    """A policy, and a way to read, under the name that tables give them."""

    label: str
    policy: Policy
    prefill: Prefill = field(default_factory=Exact)
    later: Later = "append"

    def describe(self) -> Record:
        """The policy's name and parameters, and how it reads where that is not as usual."""
        reading = {} if self.prefill == Exact() else {"prefill": self.prefill.describe()}
        later = {} if self.later == "append" else {"turns": self.later}
        return self.policy.describe() | reading | later


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
    def keys(self) -> list[Key]:
        """What its records are found by."""
        return [key for method in self.methods for key in self._keys(method)]

    def without(self, store: Store) -> Self:
        """The same of the methods of which a record is missing."""
        missing = [m for m in self.methods if not all(key in store for key in self._keys(m))]
        return replace(self, methods=missing)

    def _keys(self, method: Method) -> list[Key]:
        return [(turn.name, method.label, self.question) for turn in self.sample.turns]

    @property
    def characters(self) -> int:
        """How long it is: what an answer takes grows with it."""
        return len(self.sample.context)

    def by_method(self) -> Iterator[Self]:
        """The same of one method at a time, once more."""
        for method in self.methods:
            yield replace(self, methods=(method,), tries=self.tries + 1)

    def lost(self) -> Iterator[Record]:
        """What is recorded where nothing could answer it."""
        for method, turn in itertools.product(self.methods, self.sample.turns):
            yield self.record(turn, method) | {"status": LOST}

    def record(self, turn: Sample, method: Method) -> Record:
        """What the record of a method's answer to a turn begins with."""
        spoken = {"conversation": self.sample.name} if len(self.sample.turns) > 1 else {}
        return {
            "sample": turn.name,
            "method": method.label,
            "question": self.question,
            "cell": turn.cell,
            "policy": method.describe(),
            "references": list(turn.references),
        } | spoken


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
        """An answer of every method to every turn, or why there is none."""
        reader = PromptReader(
            self.loaded,
            asked.sample.prompt(self.loaded.tokenizer, self.template, asked.question),
            asked.sample.settings,
            [method.prefill for method in asked.methods],
        )
        for method in asked.methods:
            left, status = list(asked.sample.turns), ""
            try:
                for given in self._answers(asked, method, reader):
                    turn = left.pop(0)
                    yield asked.record(turn, method) | {"status": "ok"} | self._scored(turn, given)
            except PromptTooLongError:
                status = "too long"
            except OutOfMemoryError:
                status = LOST
            torch.cuda.empty_cache()  # does nothing where CUDA was not used
            for turn in left:
                yield asked.record(turn, method) | {"status": status}

    def _answers(self, asked: Asked, method: Method, reader: PromptReader) -> Iterator[Answer]:
        """The answer to a sample, or to every turn of a conversation."""
        sample = asked.sample
        if not isinstance(sample, Conversation):
            yield reader.answer(method.policy, method.prefill, sample.protection)
            return
        yield from converse(
            self.loaded,
            sample,
            method.policy,
            self.template,
            asked.question,
            prefill=method.prefill,
            later=method.later,
        )

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
