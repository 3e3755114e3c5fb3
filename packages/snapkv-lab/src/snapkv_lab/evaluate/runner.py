"""Run a task: every sample is answered from the cache of every method."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from snapkv.errors import wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.known_gates import with_known
from snapkv.kvzip import require_one_reading
from snapkv.validation import require_at_least
from snapkv_app.models import LoadedModel
from snapkv_lab.evaluate.asking import Answerer, Executor, Method, SampleJob
from snapkv_lab.evaluate.sample import Sample, Setting, Template, data_hash, turn_markers
from snapkv_lab.evaluate.store import Key, Progress, RunSummary, Store
from snapkv_lab.evaluate.summary import summarise
from snapkv_lab.evaluate.task import Task
from snapkv_lab.measure.environment import software_versions
from snapkv_lab.rows import Row, short_hash

_MOST_TIMES_POSITIONS = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a task on a model with several methods.

    Args:
        loaded: the model and its tokenizer.
        task: what is asked; settings that depend on the model are filled in.
        methods: the methods that answer; their labels must differ.
        questions: whether the question is visible to the vote, or both settings.
        template: how a sample becomes a prompt.
        limit: how many samples of every cell are taken; None for all.
        reference_loss: whether the loss of the references is measured too.

    Raises:
        InvalidArgumentError: there is no method, two methods have one label, the limit is below 1,
            or the template is not known for the model.
        UnsupportedModelError: a method does not work with the model.
    """

    loaded: LoadedModel
    task: Task
    methods: Sequence[Method]
    questions: Sequence[Setting] = ("visible",)
    template: Template = "tokenizer"
    limit: int | None = None
    reference_loss: bool = False

    def __post_init__(self) -> None:
        task = self.task.for_model(self.loaded.name, self.loaded.max_tokens)
        object.__setattr__(self, "task", task)
        self._require_lengths()
        if self.template == "longbench":
            turn_markers(self.loaded.tokenizer)
        object.__setattr__(self, "methods", prepare_methods(self.loaded, self.methods))
        for method in self.methods:
            if "visible" in self.questions:
                require_one_reading(method.policy, "Pass --setting hidden")
            self._require_turns(method)
        if self.limit is not None:
            require_at_least("limit", self.limit, 1)

    def fingerprint(self) -> str:
        """Return a hash of all settings that the results depend on, except the methods: 8
        hexadecimal digits, which are part of the name of the default folder.
        """
        return short_hash(self._settings())

    def keys(self) -> list[Key]:
        """Return the keys of all answers in this run, in the order of samples and settings. The
        samples are made for this.

        Raises:
            InvalidArgumentError: the settings give no sample, or one sample twice.
            MissingDependencyError: the package with the task's data is not installed.
            DocumentError: a file of the user is missing or has another form.
        """
        return _keys(self._jobs(self._samples()))

    def evaluate(
        self, folder: Path, on_progress: Progress | None = None, executor: Executor | None = None
    ) -> "Results":
        """Answer all questions that are not answered yet, and return the results. Answers that were
        lost to a lack of memory before are tried again.

        Args:
            folder: where the answers are stored; a stopped run continues there.
            on_progress: receives the progress; None for no reports.
            executor: answers the questions; None for this process.

        Raises:
            InvalidArgumentError: the folder holds another run, or a method with another policy
                under the same label; or the settings give no sample, or one sample twice.
            MissingDependencyError: the package with the task's data is not installed.
            DocumentError: a file of the user is missing or has another form.
            OutputError: an answer cannot be written; the answers before it are in the folder.
        """
        samples = self._samples()
        questions = self._jobs(samples)
        block = self._settings() | {"samples": len(samples), "data": data_hash(samples)}
        wanted = _keys(questions)
        with Store(folder, block, fields=("cell", "policy", "status")) as store:
            require_same_policies(self.methods, store.records)
            work = [missing for job in questions if (missing := job.missing_from(store)).methods]
            answering = executor or Answerer(loaded=self.loaded)
            store.complete(wanted, answering.answers(work), on_progress)
            rows = summarise(store.records, wanted, self.task)
            return Results.of(store, rows, task=self.task)

    def _samples(self) -> list[Sample]:
        """Return the samples of the task, at most `limit` of each cell.

        Raises:
            InvalidArgumentError: there is no sample, two have the same name, or a length has no
                room for one. Or the loss of the references is wanted, and a sample has an empty
                reference or none.
            MissingDependencyError: the package with the task's data is not installed.
            DocumentError: a file of the user is missing or has another form.
        """
        samples = _limit_samples(self.task.samples(self.loaded.tokenizer), self.limit)
        turns = [turn for sample in samples for turn in sample.turns]
        _require_distinct(turns)
        if self.reference_loss:
            _require_references(turns)
        return samples

    def _jobs(self, samples: Sequence[Sample]) -> list[SampleJob]:
        """Return a job for each sample and setting, the settings of the first sample first."""
        return [
            SampleJob(
                sample=sample,
                question=question,
                methods=self.methods,
                task=self.task,
                template=self.template,
                reference_loss=self.reference_loss,
            )
            for sample, question in itertools.product(samples, self.questions)
        ]

    def _settings(self) -> Row:
        """Return all settings that the results depend on, except the methods and the texts of the
        samples, as a dictionary for JSON. `run.json` contains them.
        """
        return {
            "task": self.task.describe(),
            "model": self.loaded.description(),
            "template": self.template,
            "limit": self.limit,
            **({"reference_loss": True} if self.reference_loss else {}),
            **software_versions(),
        }

    def _require_turns(self, method: Method) -> None:
        """Check that the task has later questions if the method does more than append them.

        Raises:
            InvalidArgumentError: `later` of the method is not "append", and the task has no later
                questions.
        """
        if method.later != "append" and not self.task.has_turns:
            problem = f"{method.later} has no effect with {self.task.name}, which asks one question"
            raise wrong("turns", problem, "Remove this option, or use a task such as turns")

    def _require_lengths(self) -> None:
        """Check that the prompts are not much longer than the model allows.

        Slightly longer prompts are allowed, and are recorded as too long.

        Raises:
            InvalidArgumentError: a length is more than 8 times the number of the model's positions.
        """
        positions = self.loaded.max_tokens
        for name in ("lengths", "answer_tokens"):
            longest = max(getattr(self.task, name, ()), default=0)
            if positions is not None and longest > _MOST_TIMES_POSITIONS * positions:
                raise wrong(
                    name,
                    f"expected at most {_MOST_TIMES_POSITIONS * positions:,} tokens, "
                    f"{_MOST_TIMES_POSITIONS} times the model's {positions:,} positions, but got "
                    f"{longest:,}",
                    "Pass a smaller number, or choose a model with more positions",
                )


@dataclass(frozen=True, kw_only=True)
class Results(RunSummary):
    """The result of a run, with a row for each method, setting and cell.

    See `snapkv_lab.evaluate.summary`.
    """

    task: Task


def prepare_methods(loaded: LoadedModel, methods: Sequence[Method]) -> tuple[Method, ...]:
    """Check the methods, and complete policies that use a gate or head profile known for the model.

    Returns:
        New methods in the same order.

    Raises:
        InvalidArgumentError: there is no method, two methods have one label, or a gate belongs to
            another model.
        UnsupportedModelError: a method does not work with the model.
    """
    labels = [method.label for method in methods]
    if not labels or len(set(labels)) < len(labels):
        names = ", ".join(sorted(labels)) or "none"
        problem = f"expected at least one method, each of them once, but got {names}"
        raise wrong("policy", problem, "Use every policy and every baseline only once")
    for method in methods:
        CompressedCache(loaded.model, loaded.completed(method.policy), **method.cache_options)
    return tuple(
        replace(method, policy=with_known(loaded.model, method.policy)) for method in methods
    )


def require_same_policies(methods: Sequence[Method], records: Iterable[Row]) -> None:
    """Check that the stored answers were made with the same policies as those of the methods.

    Args:
        methods: the methods of the run. Answers of other methods are not checked.
        records: the stored answers, with the keys "method" and "policy".

    Raises:
        InvalidArgumentError: an answer was made by another policy under the label of a method.
    """
    policies = {method.label: method.describe() for method in methods}
    for record in records:
        expected = policies.get(record["method"], record["policy"])
        if record["policy"] != json.loads(json.dumps(expected)):
            raise wrong(
                "policy",
                f"the answers in the folder were made by {record['method']} as "
                f"{record['policy']}, and now it is {expected}",
                "Choose a different folder",
            )


def _keys(questions: Iterable[SampleJob]) -> list[Key]:
    return [one for job in questions for one in job.keys_of(job.methods)]


def _limit_samples(samples: Iterable[Sample], limit: int | None) -> list[Sample]:
    """Return the first `limit` samples of each cell, in their order; all samples if `limit` is
    None.
    """
    taken, kept = Counter[str](), []
    for sample in samples:
        cell = str(sorted(sample.cell.items()))
        taken[cell] += 1
        if limit is None or taken[cell] <= limit:
            kept.append(sample)
    return kept


def _require_distinct(turns: Sequence[Sample]) -> None:
    """Check that there is at least one sample and that all names are different.

    Raises:
        InvalidArgumentError: there is no sample, or two samples have one name.
    """
    if not turns:
        raise wrong(
            "samples", "there are no samples with these settings", "Increase the number of samples"
        )
    ((name, times),) = Counter(turn.name for turn in turns).most_common(1)
    if times > 1:
        problem = f"expected every sample once, but got {name} {times} times"
        raise wrong("samples", problem, "Remove the setting that is repeated")


def _require_references(turns: Sequence[Sample]) -> None:
    """Check that every sample has at least one reference and no empty one.

    Raises:
        InvalidArgumentError: a sample has no reference, or an empty one.
    """
    for turn in turns:
        if not turn.references or not all(turn.references):
            problem = (
                f"expected references in every sample, but got {turn.name} with "
                f"{list(turn.references)}"
            )
            raise wrong("reference_loss", problem, "Remove this option")
