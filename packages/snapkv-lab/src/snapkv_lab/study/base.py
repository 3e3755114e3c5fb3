"""What a study is: settings in, rows out; a table and a figure of them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError, OutputError
from snapkv.validation import require_at_least
from snapkv_lab.evaluate.sample import Sample, Template
from snapkv_lab.evaluate.store import Progress, Record, Store, short_hash
from snapkv_lab.evaluate.summary import mean_of
from snapkv_lab.evaluate.task import data_hash
from snapkv_lab.study.material import LEAST_TOKENS, QUESTIONS, cut, long_texts

if TYPE_CHECKING:
    from snapkv.app.models import LoadedModel
    from snapkv_lab.study.reading import AnsweredPrompt


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a study gave."""

    folder: Path
    run: Record
    rows: list[Record]
    warnings: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    closing: str = ""
    unwritten: OutputError | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows as people read them."""

    title: str
    header: tuple[str, ...]
    lines: list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """One of the paper's observations: a frozen dataclass of its settings.

    The fields of a subclass are its options on the command line, with the texts under ``Args:`` of
    its docstring as their help.
    """

    name: ClassVar[str]

    @abstractmethod
    def into(
        self, loaded: "LoadedModel", folder: Path, on_progress: Progress | None = None
    ) -> Findings:
        """Measure what the folder does not hold yet, and summarise all of it."""

    @abstractmethod
    def table(self, rows: Sequence[Record]) -> Table:
        """The rows in brief."""

    @abstractmethod
    def figure(self, rows: Sequence[Record]) -> Any:
        """A matplotlib figure of the rows."""

    def settings(self, loaded: "LoadedModel") -> Record:
        """Everything that the rows depend on, the documents' text left out."""
        from snapkv_lab.measure.environment import versions

        study: Record = json.loads(json.dumps({"name": self.name, **asdict(self)}))
        return {"study": study, "model": loaded.description(), **versions()}

    def fingerprint(self, loaded: "LoadedModel") -> str:
        """A short name for the settings."""
        return short_hash(self.settings(loaded))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One step of a study that reads documents."""

    name: str
    variant: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class ReadingStudy(Study):
    """A study that reads long documents, has questions answered, and looks at every layer.

    Args:
        documents: files, a document each; none for essays or Python's documentation.
        questions: asked about every document, or in turns, as the study says.
        samples: documents to read where no files are given.
        document_tokens: length that documents are cut to; shorter where one of them has no more,
            or the model no positions.
        temperature: of the answers; 0 takes the likeliest token each time, and has small models
            repeat themselves.
        seed: of the answers.
        template: tokenizer for the model's chat template where it has one, none for bare text.
    """

    by: ClassVar[tuple[str, ...]]
    """What tells a row from others."""

    numbers: ClassVar[tuple[str, ...]]
    """What a row says; averaged over documents."""

    documents: tuple[str, ...] = ()
    questions: tuple[str, ...] = QUESTIONS
    samples: int = 3
    document_tokens: int = 3072
    temperature: float = 0.7
    seed: int = 0
    template: Template = "tokenizer"

    def __post_init__(self) -> None:
        """Check the settings that all studies of documents have."""
        require_at_least("samples", self.samples, 1)
        require_at_least("document_tokens", self.document_tokens, LEAST_TOKENS)
        if not self.questions or not all(question.strip() for question in self.questions):
            raise InvalidArgumentError(
                "question: expected at least one question and no empty one, got "
                f"{list(self.questions)}; ask one"
            )

    @property
    @abstractmethod
    def answer_tokens(self) -> int:
        """Tokens of every answer, whether or not the model would have ended it."""

    @abstractmethod
    def look(
        self, loaded: "LoadedModel", part: Part, readings: Sequence["AnsweredPrompt"]
    ) -> list[Record]:
        """Rows of one part, with the keys of `by` and `numbers`; a number may be None."""

    def parts(self, texts: Sequence[tuple[str, str]]) -> Iterator[Part]:
        """What is read of named documents: one question about each, in turns."""
        for number, (name, text) in enumerate(texts):
            question = self.questions[number % len(self.questions)]
            yield Part(name=name, variant="last", samples=(self.sample(name, text, question),))

    def sample(self, name: str, document: str, question: str, *, first: bool = False) -> Sample:
        """A question behind a document, or in front of it."""
        settings = GenerationSettings(
            max_new_tokens=self.answer_tokens,
            min_new_tokens=self.answer_tokens,
            temperature=self.temperature,
            seed=self.seed,
        )
        before, behind = (f"{question}\n\n", "") if first else ("", f"\n\n{question}")
        return Sample(
            name=name,
            cell={},
            context=before + document,
            question=behind,
            plain_question="\n\nAnswer:" if first else f"\n\nQuestion: {question}\nAnswer:",
            references=(),
            settings=settings,
        )

    def into(
        self, loaded: "LoadedModel", folder: Path, on_progress: Progress | None = None
    ) -> Findings:
        """Read and look at what the folder does not hold yet, and average all of it."""
        texts, warnings = long_texts(self.documents, count=self.samples)
        study, parts, notices = self._fitted(loaded, texts)
        samples = [sample for part in parts for sample in part.samples]
        block = self.settings(loaded) | {"samples": len(samples), "data": data_hash(samples)}
        if notices:
            block |= {"document_tokens_read": study.document_tokens, "notices": list(notices)}
        with Store(folder, block) as store:
            for done, part in enumerate(parts):
                if on_progress:
                    on_progress(f"{part.name}, {part.variant}", done, len(parts))
                if (part.name, self.name, part.variant) not in store:
                    store.add(study._record(loaded, part))
            if on_progress:
                on_progress("done", len(parts), len(parts))
            rows = mean_rows(
                (row for record in store.records for row in record["rows"]), self.by, self.numbers
            )
            unwritten = store.summarise(rows)
        return Findings(
            folder=folder,
            run=block,
            rows=rows,
            warnings=warnings,
            notices=notices,
            unwritten=unwritten,
        )

    def _fitted(
        self, loaded: "LoadedModel", documents: Sequence[tuple[str, str]]
    ) -> tuple["ReadingStudy", list[Part], tuple[str, ...]]:
        """The study with documents as long as they and the model allow; its parts; what to say."""
        study: ReadingStudy = self
        notices: tuple[str, ...] = ()
        while True:  # a text that was cut can have a token more than it was cut to
            found = cut(loaded.tokenizer, documents, study.document_tokens)
            if found.tokens < study.document_tokens:
                study = replace(study, document_tokens=found.tokens)
                notices = (_shortened(self, study, f"{found.shortest} has no more"),)
            parts = list(study.parts(found.texts))
            excess = study._excess_tokens(loaded, parts)
            if excess <= 0 or study.document_tokens - excess < LEAST_TOKENS:
                return study, parts, notices  # what does not fit is refused when it is read
            study = replace(study, document_tokens=study.document_tokens - excess)
            why = f"the model has {loaded.max_tokens:,} positions for prompt and answer"
            notices = (_shortened(self, study, why),)

    def _excess_tokens(self, loaded: "LoadedModel", parts: Sequence[Part]) -> int:
        """How many tokens the longest prompt and its answer have more than the model positions."""
        if loaded.max_tokens is None:
            return 0
        prompts = (
            sample.prompt(loaded.tokenizer, self.template, "visible")
            for part in parts
            for sample in part.samples
        )
        longest = max(prompt.token_ids(loaded.tokenizer).shape[1] for prompt in prompts)
        return int(longest) + self.answer_tokens - loaded.max_tokens

    def _record(self, loaded: "LoadedModel", part: Part) -> Record:
        from snapkv_lab.study.reading import read

        readings = [read(loaded, sample, self.template) for sample in part.samples]
        return {
            "sample": part.name,
            "method": self.name,
            "question": part.variant,
            "readings": [reading.describe() for reading in readings],
            "rows": self.look(loaded, part, readings),
        }


def _shortened(asked: ReadingStudy, study: ReadingStudy, why: str) -> str:
    return (
        f"documents are cut to {study.document_tokens:,} tokens instead of "
        f"{asked.document_tokens:,}: {why}"
    )


def mean_rows(rows: Iterable[Record], by: Sequence[str], numbers: Sequence[str]) -> list[Record]:
    """One row for all that agree in `by`, with the mean of each number where it is not None."""
    return [
        dict(zip(by, values, strict=True)) | {name: mean_of(group, name) for name in numbers}
        for values, group in grouped(rows, by).items()
    ]


def grouped(rows: Iterable[Record], by: Sequence[str]) -> dict[tuple[Any, ...], list[Record]]:
    """Rows by their values of some keys, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return groups


def over_layers(rows: Sequence[Record], name: str) -> str:
    """The mean of a number over rows of one layer each, its lowest and its highest value."""
    known = [row[name] for row in rows if row[name] is not None]
    if not known:
        return "-"
    return f"{fmean(known):.2f} ({min(known):.2f} to {max(known):.2f})"


def weighted(rows: Sequence[Record], name: str, weight: str) -> str:
    """The mean of a number over rows of one layer each, weighted by another number of theirs."""
    known = [row for row in rows if row[name] is not None]
    total = sum(row[weight] for row in known)
    return f"{sum(row[name] * row[weight] for row in known) / total:.2f}" if total else "-"
