"""A question of a run: a sample, asked of some methods, and the records of their answers."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from snapkv.app.answering import Answer, costs
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact, Prefill
from snapkv.app.prompt_end import PromptEnd
from snapkv.app.prompt_reader import PromptReader
from snapkv.app.prompts import Prompt
from snapkv.app.reference import References
from snapkv.errors import OutOfMemoryError, PromptTooLongError
from snapkv.policies import Policy
from snapkv_lab.evaluate.conversing import Later, converse, described
from snapkv_lab.evaluate.sample import Conversation, Sample, Setting, Template, later_turn
from snapkv_lab.evaluate.store import LOST, Key, Record, Store
from snapkv_lab.evaluate.task import Task


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
        later = {} if self.later == "append" else {"turns": described(self.later)}
        return self.policy.describe() | reading | later


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A sample, asked of some methods.

    Attributes:
        sample: what is asked.
        question: whether the vote sees it.
        methods: whose answers are wanted; they share a reading where they can.
        task: what scores the answers.
        template: how the sample becomes a prompt, see `Sample.prompt`.
        reference_loss: whether records say the loss of the references, see `References.loss`.
        tries: how many workers have ended on it.
    """

    sample: Sample
    question: Setting
    methods: Sequence[Method]
    task: Task
    template: Template
    reference_loss: bool = False
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
    """Answers questions with a model.

    Attributes:
        loaded: model and tokenizer.
    """

    loaded: LoadedModel

    def records(self, asked: Asked) -> Iterator[Record]:
        """An answer of every method to every turn, or why there is none."""
        prompt = asked.sample.prompt(self.loaded.tokenizer, asked.template, asked.question)
        wanted = self._references(asked, prompt) if asked.reference_loss else {}
        reader = PromptReader(
            self.loaded,
            prompt,
            asked.sample.settings,
            [method.prefill for method in asked.methods],
        )
        for method in asked.methods:
            left, status = list(asked.sample.turns), ""
            ends: list[PromptEnd] | None = [] if asked.reference_loss else None
            try:
                for given in self._answers(asked, method, reader, ends):
                    turn = left[0]
                    loss = {} if ends is None else {"loss": self._loss(wanted[turn.name], ends)}
                    del left[0]
                    scored = _scored(asked.task, turn, given) | loss | costs(given)
                    yield asked.record(turn, method) | {"status": "ok"} | scored
            except PromptTooLongError:
                status = "too long"
            except OutOfMemoryError:
                status = LOST
            torch.cuda.empty_cache()  # does nothing where CUDA was not used
            for turn in left:
                yield asked.record(turn, method) | {"status": status}

    def _answers(
        self, asked: Asked, method: Method, reader: PromptReader, ends: list[PromptEnd] | None
    ) -> Iterator[Answer]:
        """The answer to a sample, or to every turn of a conversation; `ends` gets its prompt's."""
        sample = asked.sample
        if not isinstance(sample, Conversation):
            yield reader.answer(method.policy, method.prefill, sample.protection, ends)
            return
        yield from converse(
            self.loaded,
            sample,
            method.policy,
            asked.template,
            asked.question,
            prefill=method.prefill,
            later=method.later,
            ends=ends,
        )

    def _references(self, asked: Asked, prompt: Prompt) -> dict[str, References]:
        """What answers every turn, by its name."""
        found = {}
        for turn in asked.sample.turns:
            if turn is not asked.sample:
                text = later_turn(turn, self.loaded.tokenizer, asked.template)
                prompt = Prompt(text=text, has_special_tokens=True)
            found[turn.name] = References.behind(prompt, turn.references, self.loaded)
        return found

    def _loss(self, references: References, ends: list[PromptEnd]) -> float | None:
        """Of the references behind the prompt that was answered last, which is then let go."""
        end = ends.pop()
        ends.clear()
        return references.loss(self.loaded, end)


def _scored(task: Task, sample: Sample, given: Answer) -> Record:
    prediction = given.text.removeprefix(sample.answer_start)
    return {"prediction": prediction, "score": task.score(sample, prediction)}
