"""Running a task: every sample from the cache of every method."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from snapkv.errors import InvalidArgumentError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.known_gates import with_known
from snapkv.kvzip import require_one_reading
from snapkv.validation import require_at_least
from snapkv_app.models import LoadedModel
from snapkv_lab.evaluate.asking import Answerer, AskedSample, Executor, Method
from snapkv_lab.evaluate.sample import Sample, Setting, Template, data_hash, turn_markers
from snapkv_lab.evaluate.store import Key, Progress, RunSummary, Store
from snapkv_lab.evaluate.summary import summarise
from snapkv_lab.evaluate.task import Task
from snapkv_lab.measure.environment import software_versions
from snapkv_lab.rows import Row, short_hash

_MOST_TIMES_POSITIONS = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """A task on a model, by several methods.

    Args:
        loaded: model and tokenizer.
        task: what is asked; what it leaves to the model is filled in.
        methods: what answers; labels must differ.
        questions: the settings to run: whether the question is visible to the vote.
        template: how a sample becomes a prompt.
        limit: how many samples to take of every cell; None for all.
        reference_loss: whether to take the loss of the references too.

    Raises:
        InvalidArgumentError: no method, two of one label, a limit below 1, or a template that the
            model has none of.
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
                require_one_reading(method.policy, "pass --setting hidden")
            self._require_turns(method)
        if self.limit is not None:
            require_at_least("limit", self.limit, 1)

    def fingerprint(self) -> str:
        """A short name for everything that a run's results depend on, its methods left out."""
        return short_hash(self._settings())

    def keys(self) -> list[Key]:
        """What its answers are found by. Errors as in `evaluate`."""
        return _keys(self._asked(self._samples()))

    def evaluate(
        self, folder: Path, on_progress: Progress | None = None, executor: Executor | None = None
    ) -> "Results":
        """Answer what the folder does not hold yet, and summarise all of it.

        What was lost to memory before is asked once more.

        Raises:
            InvalidArgumentError: the folder holds another run, or a method of another policy under
                the same label; the settings give no sample, or one of them twice.
            MissingDependencyError: the task's data is in a package that is not installed.
            OutputError: an answer cannot be written; those before it are in the folder.
        """
        samples = self._samples()
        whole = self._asked(samples)
        block = self._settings() | {"samples": len(samples), "data": data_hash(samples)}
        wanted = _keys(whole)
        with Store(folder, block, fields=("cell", "policy", "status")) as store:
            require_same_policies(self.methods, store.records)
            work = [missing for asked in whole if (missing := asked.without(store)).methods]
            answering = executor or Answerer(loaded=self.loaded)
            store.complete(wanted, answering.answers(work), on_progress)
            rows = summarise(store.records, wanted, self.task)
            return Results.of(store, rows, task=self.task)

    def _samples(self) -> list[Sample]:
        samples = _limit_samples(self.task.samples(self.loaded.tokenizer), self.limit)
        turns = [turn for sample in samples for turn in sample.turns]
        _require_distinct(turns)
        if self.reference_loss:
            _require_references(turns)
        return samples

    def _asked(self, samples: Sequence[Sample]) -> list[AskedSample]:
        return [
            AskedSample(
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
        return {
            "task": self.task.describe(),
            "model": self.loaded.description(),
            "template": self.template,
            "limit": self.limit,
            **({"reference_loss": True} if self.reference_loss else {}),
            **software_versions(),
        }

    def _require_turns(self, method: Method) -> None:
        """Raise where a method says of later questions what has no effect, or cannot be."""
        if method.later != "append" and not self.task.has_turns:
            raise InvalidArgumentError(
                f"turns: expected it with a task of several questions about one text, such as "
                f"turns, got {method.later} with {self.task.name}; leave it out"
            )

    def _require_lengths(self) -> None:
        """Raise where prompts would be made only to be found far too long; a few are shown so."""
        positions = self.loaded.max_tokens
        for name in ("lengths", "answer_tokens"):
            longest = max(getattr(self.task, name, ()), default=0)
            if positions is not None and longest > _MOST_TIMES_POSITIONS * positions:
                raise InvalidArgumentError(
                    f"{name}: expected at most {_MOST_TIMES_POSITIONS * positions:,} tokens, "
                    f"{_MOST_TIMES_POSITIONS} times the model's {positions:,} positions, got "
                    f"{longest:,}; pass a smaller number, or choose a model with more positions"
                )


@dataclass(frozen=True, kw_only=True)
class Results(RunSummary):
    """What was asked gave a row per method, setting and cell, see `snapkv_lab.evaluate.summary`."""

    task: Task


def prepare_methods(loaded: LoadedModel, methods: Sequence[Method]) -> tuple[Method, ...]:
    """The methods, with what was found of the model's heads or layers where one goes by that.

    Raises:
        InvalidArgumentError: no method, or two of one label, or nothing was found of the heads.
        UnsupportedModelError: a method does not work with the model.
    """
    labels = [method.label for method in methods]
    if not labels or len(set(labels)) < len(labels):
        raise InvalidArgumentError(
            f"policy: expected at least one method, and every one once, got "
            f"{', '.join(sorted(labels)) or 'none'}; name a policy or a baseline, each once"
        )
    for method in methods:
        CompressedCache(loaded.model, loaded.completed(method.policy), **method.cache_options)
    return tuple(
        replace(method, policy=with_known(loaded.model, method.policy)) for method in methods
    )


def require_same_policies(methods: Sequence[Method], records: Iterable[Row]) -> None:
    """Raise where an answer of one of the methods was made by something else of its name."""
    policies = {method.label: method.describe() for method in methods}
    for record in records:
        asked = policies.get(record["method"], record["policy"])
        if record["policy"] != json.loads(json.dumps(asked)):
            raise InvalidArgumentError(
                f"policy: expected {record['method']} to be what it was when the folder's "
                f"answers were made, {record['policy']}, got {asked}; choose another folder"
            )


def _keys(whole: Iterable[AskedSample]) -> list[Key]:
    return [one for asked in whole for one in asked.keys_of(asked.methods)]


def _limit_samples(samples: Iterable[Sample], limit: int | None) -> list[Sample]:
    taken, kept = Counter[str](), []
    for sample in samples:
        cell = str(sorted(sample.cell.items()))
        taken[cell] += 1
        if limit is None or taken[cell] <= limit:
            kept.append(sample)
    return kept


def _require_distinct(turns: Sequence[Sample]) -> None:
    """Raise unless there are samples, each under a name of its own."""
    if not turns:
        raise InvalidArgumentError(
            "samples: expected at least one, got none with these settings; ask for more"
        )
    ((name, times),) = Counter(turn.name for turn in turns).most_common(1)
    if times > 1:
        raise InvalidArgumentError(
            f"samples: expected every sample once, got {name} {times} times; leave out the setting "
            "that is repeated"
        )


def _require_references(turns: Sequence[Sample]) -> None:
    """Raise where a loss is asked for and there is nothing to take it of."""
    for turn in turns:
        if not turn.references or not all(turn.references):
            raise InvalidArgumentError(
                f"reference_loss: expected samples that each have a right answer, none of them "
                f"empty, got {turn.name} with {list(turn.references)}; leave it out"
            )
