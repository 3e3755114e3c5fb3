"""The questions of a run: a sample, the methods that answer it, and the records of their
answers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, Self

import torch

from snapkv.errors import BudgetTooSmallError, OutOfMemoryError, PromptTooLongError
from snapkv.hf.cache import CompressedCache
from snapkv.policies import Policy
from snapkv.storage.bits import KVCodes
from snapkv_app.answering import Answer, answer_ids, costs, prompt_ids, require_positions
from snapkv_app.conversation import joined
from snapkv_app.likelihood import References
from snapkv_app.models import LoadedModel
from snapkv_app.prefills import Exact, Prefill
from snapkv_app.prompt_end import PromptEnd
from snapkv_app.prompt_reader import PromptReader
from snapkv_app.prompts import Prompt
from snapkv_lab.evaluate.sample import Conversation, Sample, Setting, Template
from snapkv_lab.evaluate.store import LOST, Key, Store
from snapkv_lab.evaluate.task import Task
from snapkv_lab.rows import Row

Later = Literal["append", "compress", "recall"]
"""How a later question is handled: "append" stores it after the kept tokens, "compress" lets it
vote on the kept tokens, and "recall" lets it vote on all tokens that were read.
"""

LATER: dict[Later, dict[str, Any]] = {
    "append": {},
    "compress": {"turns": "compress"},
    "recall": {"recall": "host"},
}
"""The options of `CompressedCache` for each way."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a prompt is read, compressed and stored, and how later questions are handled.

    Attributes:
        label: the name in tables.
        policy: what is kept.
        prefill: how the prompt is read.
        later: how later questions of a conversation are handled.
        bits: how keys and values are stored; None for unquantized.
    """

    label: str
    policy: Policy
    prefill: Prefill = field(default_factory=Exact)
    later: Later = "append"
    bits: KVCodes | None = None

    def stored_in(self, bits: KVCodes | None) -> Self:
        """Return a copy of the method that uses the given storage, which its label names.

        None means unquantized storage and leaves the label as it is.
        """
        label = self.label if bits is None else f"{self.label} {bits}"
        return replace(self, label=label, bits=bits)

    def describe(self) -> Row:
        """Return the settings of the method as a new dictionary for JSON.

        They are those of the policy, with its "name", and "prefill", "turns" and "bits" if they are
        not the default. The label is not among them.
        """
        reading = {} if self.prefill == Exact() else {"prefill": self.prefill.describe()}
        later = {} if self.later == "append" else {"turns": self.later}
        bits = {} if self.bits is None else {"bits": asdict(self.bits)}
        return self.policy.describe() | reading | later | bits

    @property
    def cache_options(self) -> dict[str, Any]:
        """The keyword arguments for creating the method's `CompressedCache`, besides the model and
        the policy.
        """
        return LATER[self.later] | ({} if self.bits is None else {"quantize": self.bits})


@dataclass(frozen=True, kw_only=True)
class SampleJob:
    """A sample and the methods that answer it. The methods share a reading where they can.

    Attributes:
        sample: the text with its question, or a conversation.
        question: whether the question is visible to the vote.
        methods: the methods that answer.
        task: scores the answers.
        template: how the sample becomes a prompt.
        reference_loss: whether the loss of the references is measured.
        tries: how many workers have ended while they worked on it.
    """

    sample: Sample
    question: Setting
    methods: Sequence[Method]
    task: Task
    template: Template
    reference_loss: bool = False
    tries: int = 0

    def keys_of(self, methods: Sequence[Method]) -> list[Key]:
        """Return the keys of the records for the given methods: all turns of each in order."""
        pairs = itertools.product(methods, self.sample.turns)
        return [(turn.name, method.label, self.question) for method, turn in pairs]

    def missing_from(self, store: Store) -> Self:
        """Return a copy with only the methods whose records are not all in the store. The copy may
        have no methods.

        A method that lacks the record of a single turn stays, because its whole conversation must
        be repeated.
        """
        missing = [m for m in self.methods if not all(key in store for key in self.keys_of([m]))]
        return replace(self, methods=missing)

    def split_by_method(self) -> Iterator[Self]:
        """Yield a copy for each method, which has only this method, and in which `tries` is larger
        by 1.
        """
        for method in self.methods:
            yield replace(self, methods=(method,), tries=self.tries + 1)

    def lost_records(self) -> Iterator[Row]:
        """Yield a record for every method and turn, which says that its answer was lost because
        memory ran out.
        """
        for method, turn in itertools.product(self.methods, self.sample.turns):
            yield self.record(turn, method) | {"status": LOST}

    def record(self, turn: Sample, method: Method) -> Row:
        """Return the first fields of the record of an answer, without its status and its costs:
        "sample", "method", "question", "cell", "policy", "references", and for a conversation
        "conversation", its name.
        """
        spoken = {"conversation": self.sample.name} if len(self.sample.turns) > 1 else {}
        return {
            "sample": turn.name,
            "method": method.label,
            "question": self.question,
            "cell": turn.cell,
            "policy": method.describe(),
            "references": list(turn.references),
        } | spoken


class Executor(Protocol):
    """An interface for the objects that answer the questions of a run.

    It is an `Answerer`, or a group of workers on Ray.
    """

    def answers(self, work: Sequence[SampleJob]) -> Iterator[Row]:
        """Yield a record for each method and each turn of each question, in any order.

        A missing answer has a record, too, whose status says why it is missing.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """An executor that answers questions in this process, one after the other."""

    loaded: LoadedModel

    def answers(self, work: Sequence[SampleJob]) -> Iterator[Row]:
        """Yield a record for every method and turn of every question, in the order of the work."""
        for job in work:
            yield from self.records(job)

    def records(self, job: SampleJob) -> Iterator[Row]:
        """Yield a record for every method and every turn, the turns of the first method first.

        The record of an answer has the status "ok", the prediction, its score, its costs, and the
        loss of the references if that is wanted. If an answer fails, this turn and the later turns
        of the method get a record with the status "too long", "budget too small" or `LOST`.
        """
        prompt = job.sample.prompt(self.loaded.tokenizer, job.template, job.question)
        references = self._references(job, prompt) if job.reference_loss else None
        ways = [method.prefill for method in job.methods]
        reader = PromptReader(self.loaded, prompt, job.sample.settings, ways)
        for method in job.methods:
            remaining, status = list(job.sample.turns), ""
            ends: list[PromptEnd] | None = None if references is None else []
            try:
                for answer in self._answers(job, method, reader, ends):
                    turn = remaining[0]
                    prediction = answer.text.removeprefix(turn.answer_start)
                    outcome: Row = {"status": "ok", "prediction": prediction}
                    outcome["score"] = job.task.score(turn, prediction)
                    if references is not None and ends is not None:
                        outcome["loss"] = references[turn.name].loss(self.loaded, ends.pop())
                        ends.clear()
                    del remaining[0]
                    yield job.record(turn, method) | outcome | costs(answer)
            except PromptTooLongError:
                status = "too long"
            except BudgetTooSmallError:
                status = "budget too small"
            except OutOfMemoryError:
                status = LOST
            torch.cuda.empty_cache()  # does nothing without CUDA
            for turn in remaining:
                yield job.record(turn, method) | {"status": status}

    def _answers(
        self, job: SampleJob, method: Method, reader: PromptReader, ends: list[PromptEnd] | None
    ) -> Iterator[Answer]:
        """Yield the answer to a sample, or to every turn of a conversation.

        If `ends` is a list, the end of each prompt is appended to it before its answer is yielded.

        Raises:
            PromptTooLongError: a turn needs more positions than the model has.
            BudgetTooSmallError: the budget in bytes has no room for what must be kept.
            OutOfMemoryError: the device has no memory left.
        """
        sample = job.sample
        if isinstance(sample, Conversation):
            how = method, job.template, job.question
            yield from converse(self.loaded, sample, *how, ends=ends)
        else:
            way = method.policy, method.prefill, sample.protection
            yield reader.answer(*way, ends, method.bits)

    def _references(self, job: SampleJob, prompt: Prompt) -> dict[str, References]:
        references = {}
        for turn in job.sample.turns:
            if turn is not job.sample:
                prompt = turn.later_turn(self.loaded.tokenizer, job.template)
            references[turn.name] = References.after(prompt, turn.references, self.loaded)
        return references


def converse(
    loaded: LoadedModel,
    conversation: Conversation,
    method: Method,
    template: Template,
    setting: Setting,
    *,
    ends: list[PromptEnd] | None = None,
) -> Iterator[Answer]:
    """Read a text once, and answer each question after the previous question and its answer.

    The answers are the model's own, and a wrong answer stays in the conversation.

    Args:
        loaded: the model and its tokenizer.
        conversation: the text and its questions.
        method: how the text is compressed, and how later questions are handled.
        template: how turns become prompts.
        setting: whether the first question votes on the text.
        ends: a list that the end of every question is appended to, or None.

    Yields:
        The answer to every question.

    Raises:
        PromptTooLongError: a turn needs more positions than the model has.
        BudgetTooSmallError: the budget in bytes has no room for what must be kept.
        OutOfMemoryError: the device has no memory left.
    """
    tokenizer, policy = loaded.tokenizer, loaded.completed(method.policy)
    prompt = conversation.prompt(tokenizer, template, setting)
    spans = conversation.protection.spans(prompt, policy, tokenizer)
    cache = CompressedCache(loaded.model, policy, protect=spans, **method.cache_options)
    read_ids: torch.Tensor | None = None
    for turn in conversation.turns:
        if read_ids is None:
            ids = prompt_ids(loaded, prompt, turn.settings)
        else:
            prompt = turn.later_turn(tokenizer, template)
            is_chat = turn.is_chat(tokenizer, template)
            ids = joined(loaded, read_ids, prompt, turn.settings, is_chat=is_chat)
            require_positions(loaded, ids.shape[1], turn.settings)
        cache.expect_question(prompt.question_tokens(tokenizer))
        answer, read_ids = answer_ids(
            loaded,
            ids,
            cache,
            turn.settings,
            answer_start=turn.answer_start,
            context_tokens=prompt.context_tokens(tokenizer),
            prefill=method.prefill,
            on_prompt_end=None if ends is None else ends.append,
        )
        yield answer
