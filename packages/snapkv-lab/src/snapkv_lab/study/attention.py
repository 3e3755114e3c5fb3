"""Studies that read documents, ask questions about them, and look at the attention of each
layer.
"""

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from snapkv.errors import wrong
from snapkv.validation import require_at_least
from snapkv_app.settings import GenerationSettings
from snapkv_lab.drawing import Panel, draw_curves
from snapkv_lab.evaluate.sample import Sample, Template, data_hash
from snapkv_lab.evaluate.store import Progress, Store, key_fields
from snapkv_lab.report.tables import Table
from snapkv_lab.rows import Row, group_rows, select_rows
from snapkv_lab.study.base import (
    Findings,
    Study,
    format_range_over_layers,
    format_weighted_mean,
    group_by_label,
    mean_rows,
)
from snapkv_lab.study.material import LEAST_TOKENS, QUESTIONS, cut_documents, load_long_texts

if TYPE_CHECKING:
    from torch import Tensor

    from snapkv.policies import PromptLayer, SnapKV
    from snapkv_app.models import LoadedModel


LayerNumbers = dict[tuple[str, int], dict[str, float | None]]
"""The numbers of one layer, by two keys: the kind of the rows, and the number of a window."""


class Reading(NamedTuple):
    """The token ids of a prompt and its answer, with the text of the answer.

    The ids are (1, T + answer), the prompt first.
    """

    ids: "Tensor"
    prompt_tokens: int
    answer: str

    @property
    def tokens(self) -> int:
        """The total number of tokens in the prompt and the answer."""
        return int(self.ids.shape[1])

    def describe(self) -> Row:
        """Return a dictionary for JSON with "prompt_tokens", "answer_tokens" and "answer", the text
        of the answer.
        """
        return {
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.tokens - self.prompt_tokens,
            "answer": self.answer,
        }


def read_sample(loaded: "LoadedModel", sample: Sample, template: Template) -> Reading:
    """Generate the answer to a sample with the full cache. The question is visible in the prompt.

    Args:
        loaded: the model and its tokenizer.
        sample: the sample, whose settings decide the length of the answer.
        template: how the sample becomes a prompt.

    Raises:
        PromptTooLongError: the model has too few positions for prompt and answer.
        InvalidArgumentError: the template is "longbench", and the model's name is not known to it.
    """
    from snapkv.hf.cache import CompressedCache
    from snapkv.policies import FullCache
    from snapkv_app.answering import continue_ids, prompt_ids

    prompt = sample.prompt(loaded.tokenizer, template, "visible")
    ids = prompt_ids(loaded, prompt, sample.settings)
    output = continue_ids(loaded, ids, CompressedCache(loaded.model, FullCache()), sample.settings)
    answer = loaded.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return Reading(output, ids.shape[1], answer)


class ReadingStep(NamedTuple):
    """A step of the study, in which questions about a document are answered.

    `variant` distinguishes it from other steps about the same document.
    """

    name: str
    variant: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class ReadingStudy(Study):
    """A study that reads long documents, asks questions about them, and looks at every layer.

    Args:
        documents: files, one document each; by default essays or Python's documentation.
        questions: asked about every document, or in turns, as the study says.
        samples: number of documents without files.
        document_tokens: length that documents are cut to; less if a document or the model's
            positions are too short.
        temperature: of the answers; 0 is greedy decoding, with which small models repeat
            themselves.
        seed: random seed of the answers.
        template: tokenizer for the model's chat template, if any; none for plain text.
    """

    by: ClassVar[tuple[str, ...]]
    """The fields that distinguish a row from others."""

    numbers: ClassVar[tuple[str, ...]]
    """The numbers of a row, which are averaged over documents; None is left out."""

    row_keys: ClassVar[tuple[str, str]]
    """The two fields that distinguish the rows of one layer."""

    documents: tuple[str, ...] = ()
    samples: int = 3
    document_tokens: int = 3072
    seed: int = 0
    questions: tuple[str, ...] = QUESTIONS
    temperature: float = 0.7
    template: Template = "tokenizer"

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range, or there is no question, or an empty
                one. The smallest `document_tokens` is `LEAST_TOKENS`.
            InvalidTypeError: a number is not an integer.
        """
        require_at_least("samples", self.samples, 1)
        require_at_least("document_tokens", self.document_tokens, LEAST_TOKENS)
        if not self.questions or not all(question.strip() for question in self.questions):
            problem = (
                f"expected at least one question and no empty one, but got {list(self.questions)}"
            )
            raise wrong("question", problem, "Ask a question")

    @property
    @abstractmethod
    def answer_tokens(self) -> int:
        """The number of tokens in each answer."""

    def measure_step(
        self, loaded: "LoadedModel", step: ReadingStep, readings: Sequence[Reading]
    ) -> list[Row]:
        """Return the rows of a single step, with one or more rows for each layer.

        Args:
            loaded: the model, which reads prompt and answer again.
            step: the step.
            readings: one for each sample of the step. Here there must be exactly one.

        Returns:
            Rows with the fields of `by` and `numbers`.
        """
        from snapkv_app.observing import observed

        (reading,) = readings
        measured = partial(self.measure_layer, prompt_tokens=reading.prompt_tokens)
        seen = observed(loaded, reading.ids, self.query_tokens, measured)
        return [
            dict(zip(self.row_keys, key, strict=True)) | {"layer": layer} | numbers
            for layer, rows in seen.items()
            for key, numbers in rows.items()
        ]

    @property
    def query_tokens(self) -> int:
        """The number of queries at the end of prompt and answer whose attention is measured.

        Raises:
            NotImplementedError: the study has its own `measure_step` and does not need this.
        """
        raise NotImplementedError

    def measure_layer(self, layer: "PromptLayer", prompt_tokens: int) -> LayerNumbers:
        """Measure the attention in one layer of the model.

        Args:
            layer: the layer with the states of prompt and answer.
            prompt_tokens: the length of the prompt.

        Returns:
            The numbers by the values of the two fields of `row_keys`.

        Raises:
            NotImplementedError: the study has its own `measure_step` and does not need this.
        """
        raise NotImplementedError

    def steps(self, texts: Sequence[tuple[str, str]]) -> Iterator[ReadingStep]:
        """Yield the steps of the study: here one for each document, with one of the questions. The
        questions take turns.

        Args:
            texts: the name and the text of each document.
        """
        for number, (name, text) in enumerate(texts):
            question = self.questions[number % len(self.questions)]
            yield ReadingStep(name, "last", (self.sample(name, text, question),))

    def sample(self, name: str, document: str, question: str, *, first: bool = False) -> Sample:
        """Return a sample with a question about a document, whose answer has exactly
        `answer_tokens` tokens.

        Args:
            name: the name of the sample.
            document: the text of the document.
            question: the question.
            first: whether the question comes before the document instead of after it.
        """
        settings = GenerationSettings(
            max_new_tokens=self.answer_tokens,
            min_new_tokens=self.answer_tokens,
            temperature=self.temperature,
            seed=self.seed,
        )
        before, after = (f"{question}\n\n", "") if first else ("", f"\n\n{question}")
        return Sample(
            name=name,
            cell={},
            context=before + document,
            question=after,
            plain_question="\n\nAnswer:" if first else f"\n\nQuestion: {question}\nAnswer:",
            references=(),
            settings=settings,
        )

    def measure(
        self, loaded: "LoadedModel", folder: Path, on_progress: Progress | None = None
    ) -> Findings:
        """Run all steps that have not been run yet, and return the means of all steps.

        Documents are cut to a common length; `notices` of the result say if it is shorter than
        `document_tokens`.

        Raises:
            InvalidArgumentError: the folder holds another run, or a document is too short.
            DocumentError: a document cannot be read.
            OutputError: a record cannot be written; the records before it are in the folder.
            PromptTooLongError: the model has too few positions.
        """
        texts, warnings = load_long_texts(self.documents, count=self.samples)
        study, steps, notices = self._fit_documents(loaded, texts)
        samples = [sample for step in steps for sample in step.samples]
        block = self.settings(loaded) | {"samples": len(samples), "data": data_hash(samples)}
        if notices:
            block |= {"document_tokens_read": study.document_tokens, "notices": list(notices)}
        keys = [(step.name, self.name, step.variant) for step in steps]
        with Store(folder, block) as store:
            records = (
                key_fields(key) | study._record(loaded, step)
                for key, step in zip(keys, steps, strict=True)
                if key not in store
            )
            store.complete(keys, records, on_progress)
            step_rows = (row for record in store.records for row in record["rows"])
            rows = mean_rows(step_rows, self.by, self.numbers)
            return Findings.of(store, rows, warnings=warnings, notices=notices)

    def _fit_documents(
        self, loaded: "LoadedModel", documents: Sequence[tuple[str, str]]
    ) -> tuple["ReadingStudy", list[ReadingStep], tuple[str, ...]]:
        """Cut the documents to `document_tokens` tokens, or to the length of the shortest document
        or to the length that the model has positions for, if that is less.

        Returns:
            The study with the new length, its steps, and a notice if the length was changed. If
            even documents of `LEAST_TOKENS` are too long for the model, the steps do not fit.

        Raises:
            InvalidArgumentError: a document is shorter than `LEAST_TOKENS`.
        """
        study, why = self, ""
        while True:  # a text can have one more token after it was cut and tokenized again
            cut = cut_documents(loaded.tokenizer, documents, study.document_tokens)
            if cut.tokens < study.document_tokens:
                why = f"{cut.shortest} has no more"
                study = replace(study, document_tokens=cut.tokens)
            steps = list(study.steps(cut.texts))
            excess = study._excess_tokens(loaded, steps)
            if excess <= 0 or study.document_tokens - excess < LEAST_TOKENS:
                tokens = f"{cut.tokens:,} tokens instead of {self.document_tokens:,}"
                notices = (f"documents are cut to {tokens}: {why}",) if why else ()
                return study, steps, notices  # a document that does not fit is refused later
            why = f"the model has {loaded.max_tokens:,} positions for prompt and answer"
            study = replace(study, document_tokens=study.document_tokens - excess)

    def _excess_tokens(self, loaded: "LoadedModel", steps: Sequence[ReadingStep]) -> int:
        """Return by how many tokens the longest prompt with its answer exceeds the positions of the
        model. The number is negative or 0 if all prompts fit, and 0 if the model has no limit.
        """
        if loaded.max_tokens is None:
            return 0
        samples = (sample for step in steps for sample in step.samples)
        prompts = (each.prompt(loaded.tokenizer, self.template, "visible") for each in samples)
        longest = max(int(each.token_ids(loaded.tokenizer).shape[1]) for each in prompts)
        return longest + self.answer_tokens - loaded.max_tokens

    def _record(self, loaded: "LoadedModel", step: ReadingStep) -> Row:
        """Answer the samples of a step with the full cache, and return the record of the step
        without its key.

        Returns:
            A dictionary for JSON with "readings", one description for each sample, and "rows",
            those of `measure_step`. The caller must store it.

        Raises:
            PromptTooLongError: the model has too few positions.
        """
        readings = [read_sample(loaded, sample, self.template) for sample in step.samples]
        return {
            "readings": [reading.describe() for reading in readings],
            "rows": self.measure_step(loaded, step, readings),
        }


SELECTIONS = ("vote", "sinks and recent")
"""The selection of the window's vote, and as many first and last positions without a vote."""


@dataclass(frozen=True, kw_only=True)
class HitRate(ReadingStudy):
    """How many positions with strong attention from the answer had been voted for.

    The last tokens of the prompt vote, and each query head keeps the best part of the prefix. A
    position of the prefix is important to a generated token and a head if its attention is above
    the threshold. The hit rate is the share of the important positions that was kept. The sums of
    Eq. 8 are over the heads of a layer and the tokens of a generation window. The table also shows
    the rate without the attention sinks (the first tokens), and both rates for a selection of the
    first and the last tokens of the prefix.

    Args:
        keep_ratio: the part of the prefix that is kept, p in the paper.
        threshold: attention that makes a position important, theta in the paper.
        window_size: tokens at the end of the prompt that vote.
        kernel_size: width of the pooling; 1, as in the paper's study, for none.
        group_reduce: how heads that share keys vote together; none as in the paper's study.
        sink_tokens: first tokens that are left out of the second rate.
        generation_windows: parts of the answer to look at one by one.
        generation_tokens: tokens of each part.
    """

    name: ClassVar[str] = "hit-rate"
    compared: ClassVar[str] = "window"
    by: ClassVar[tuple[str, ...]] = ("selection", "window", "layer")
    row_keys: ClassVar[tuple[str, str]] = ("selection", "window")
    numbers: ClassVar[tuple[str, ...]] = (
        "hit_rate",
        "hit_rate_beyond_sinks",
        "important",
        "important_beyond_sinks",
    )

    keep_ratio: float = 0.05
    threshold: float = 0.05
    window_size: int = 32
    kernel_size: int = 1
    group_reduce: Literal["none", "mean", "max", "sum"] = "none"
    sink_tokens: int = 4
    generation_windows: int = 4
    generation_tokens: int = 128

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range, or too few positions are kept.
            InvalidTypeError: a value has the wrong type.
        """
        super().__post_init__()
        for name in ("generation_windows", "generation_tokens"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("sink_tokens", self.sink_tokens, 0)
        if not 0 < self.threshold < 1:
            problem = f"expected attention between 0 and 1, but got {self.threshold}"
            raise wrong("threshold", problem, "Pass 0.05")
        self._voting_policy()
        if int(self.keep_ratio * (self.document_tokens - self.window_size)) <= self.sink_tokens:
            raise wrong(
                "keep_ratio",
                f"{self.keep_ratio} of a document of {self.document_tokens} tokens keeps no more "
                f"than sink_tokens={self.sink_tokens} positions",
                "Raise keep_ratio or document_tokens",
            )

    @property
    def answer_tokens(self) -> int:
        return self.generation_windows * self.generation_tokens

    @property
    def query_tokens(self) -> int:
        return self.window_size + self.answer_tokens

    def measure_layer(self, layer: "PromptLayer", prompt_tokens: int) -> LayerNumbers:
        """Measure the hit rates in one layer.

        Args:
            layer: the layer with the states of prompt and answer.
            prompt_tokens: the length of the prompt.

        Returns:
            For each selection of `SELECTIONS` and each window of the answer, counted from 1:
            "hit_rate" and "hit_rate_beyond_sinks", from 0 to 1 or None if no position is important;
            and "important" and "important_beyond_sinks", the mean number of important positions per
            query and head.
        """
        from snapkv_lab.study.measures import important_and_hit

        masks = self._select_positions(layer, prompt_tokens)
        rows: LayerNumbers = {}
        for window in range(self.generation_windows):
            start = prompt_tokens + window * self.generation_tokens
            span = {"start": start, "stop": start + self.generation_tokens}
            important, hit = important_and_hit(layer, masks, **span, threshold=self.threshold)
            queries = self.generation_tokens * layer.queries.shape[1]
            for selection, own in zip(SELECTIONS, hit, strict=True):
                numbers = rows[selection, window + 1] = {}
                for beyond, first in (("", 0), ("_beyond_sinks", self.sink_tokens)):
                    numbers[f"hit_rate{beyond}"] = _hit_rate(own[first:], important[first:])
                    numbers[f"important{beyond}"] = int(important[first:].sum()) / queries
        return rows

    def _select_positions(self, layer: "PromptLayer", prompt_tokens: int) -> "Tensor":
        """Return the positions in the prefix that are kept by each selection. Both selections keep
        the same number per head.

        Args:
            layer: the layer, which must have the queries of the window.
            prompt_tokens: the length of the prompt; the prefix is the prompt without the window.

        Returns:
            (2, Hq, prefix) bool, in the order of `SELECTIONS`.
        """
        import torch

        from snapkv_lab.study.measures import layer_between, selected_mask

        prefix = prompt_tokens - self.window_size
        voted = selected_mask(
            self._voting_policy(), layer_between(layer, prefix, prompt_tokens), prefix
        )
        recent = torch.arange(prefix, device=voted.device) >= (
            prefix - int(voted[0].sum()) + self.sink_tokens
        )
        recent[: self.sink_tokens] = True
        return torch.stack([voted, recent.expand_as(voted)])

    def _voting_policy(self) -> "SnapKV":
        from snapkv.policies import SnapKV

        return SnapKV(
            keep_ratio=self.keep_ratio,
            window_size=self.window_size,
            kernel_size=self.kernel_size,
            group_reduce=self.group_reduce,
        )

    def table(self, rows: Sequence[Row]) -> Table:
        """Return a table with the mean hit rates over all layers, and with means in which a layer
        has the weight of its number of important positions, because a rate says little in layers
        with few of them.
        """
        rates = ("hit_rate", "important"), ("hit_rate_beyond_sinks", "important_beyond_sinks")

        def texts(own: Sequence[Row]) -> Iterator[str]:
            for rate, count in rates:
                yield from (
                    format_range_over_layers(own, rate),
                    format_weighted_mean(own, rate, count),
                )

        beyond = f"beyond the first {self.sink_tokens}"
        return Table(
            title="hit rate: mean over layers (lowest to highest), and mean weighted by the number "
            "of important positions in a layer",
            headings=("kept", self.compared, "hit rate", "weighted", beyond, "weighted"),
            rows=[
                (*map(str, key), *texts(own))
                for key, own in group_rows(rows, itemgetter("selection", self.compared)).items()
            ],
            left=6,
        )

    def figure(self, rows: Sequence[Row]) -> Any:
        solid, dotted = (
            group_by_label(
                (row for row in rows if row["selection"] == selection),
                self.compared,
                f"{selection}, {self.compared} {{}}",
            )
            for selection in SELECTIONS
        )
        beyond = f"Without the first {self.sink_tokens} tokens"
        return draw_curves(
            Panel("All important positions", "layer", "hit_rate", solid, dotted),
            Panel(beyond, "layer", "hit_rate_beyond_sinks", solid, dotted),
        )


def _hit_rate(hit: "Tensor", important: "Tensor") -> float | None:
    """Return the share of important positions that were selected (Eq. 8), from 0 to 1, or None if
    there are no important positions.

    Args:
        hit: (P,) int64, how often each position is important and selected.
        important: (P,) int64, how often each position is important.
    """
    total = int(important.sum())
    return int(hit.sum()) / total if total else None


@dataclass(frozen=True, kw_only=True)
class Position(HitRate):
    """Whether the vote works as well with the question before the document.

    The hit rates of `hit-rate`, for the same question about the same document at the end of the
    prompt and at its beginning. With the question at the beginning, the observation window contains
    no word of it.

    Args:
        generation_windows: parts of the answer; their rates are averaged.
    """

    name: ClassVar[str] = "position"
    compared: ClassVar[str] = "question"
    by: ClassVar[tuple[str, ...]] = ("selection", "question", "layer")

    generation_windows: int = 2

    def steps(self, texts: Sequence[tuple[str, str]]) -> Iterator[ReadingStep]:
        for step in super().steps(texts):
            yield step
            (last,) = step.samples
            question = last.question.strip()
            first = self.sample(step.name, last.context, question, first=True)
            yield ReadingStep(step.name, "first", (first,))

    def measure_step(
        self, loaded: "LoadedModel", step: ReadingStep, readings: Sequence[Reading]
    ) -> list[Row]:
        return [
            {"question": step.variant, **row}
            for row in super().measure_step(loaded, step, readings)
        ]


@dataclass(frozen=True, kw_only=True)
class Overlap(ReadingStudy):
    """Which positions each window of the prompt attends to most, against the answer.

    The end of the prompt and the answer are cut into windows. The attention of a window to the
    prompt is averaged over its tokens, and the positions with the most attention belong to the
    window, for each query head. The overlap of two windows is the share of the first one's
    positions that belong to the second one too. Windows of the prompt are compared with the whole
    answer (Fig. 2), and those of the answer with the last window of the prompt (Fig. 3).

    The candidates are all positions before the last window. An early window cannot attend to what
    follows it. A second number therefore only has the positions before the first window as
    candidates, which every window sees.

    Args:
        keep_ratio: the part of the candidates that a window keeps.
        window_tokens: tokens of a window, in prompt and answer.
        prompt_windows: windows of the prompt, the last one at its end.
        generation_windows: windows of the answer.
    """

    name: ClassVar[str] = "overlap"
    by: ClassVar[tuple[str, ...]] = ("of", "window", "layer")
    row_keys: ClassVar[tuple[str, str]] = ("of", "window")
    numbers: ClassVar[tuple[str, ...]] = ("overlap", "overlap_of_common")

    keep_ratio: float = 0.05
    window_tokens: int = 128
    prompt_windows: int = 20
    generation_windows: int = 4

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range, or no position would be kept.
            InvalidTypeError: a number is not an integer.
        """
        super().__post_init__()
        for name in ("window_tokens", "prompt_windows", "generation_windows"):
            require_at_least(name, getattr(self, name), 1)
        before = self.document_tokens - self.prompt_windows * self.window_tokens
        if not 0 < self.keep_ratio < 1 or int(self.keep_ratio * before) < 1:
            raise wrong(
                "keep_ratio",
                f"{self.keep_ratio} is not at least one of the {max(before, 0):,} positions before "
                f"{self.prompt_windows} windows of {self.window_tokens} tokens",
                "Raise document_tokens, or lower prompt_windows",
            )

    @property
    def answer_tokens(self) -> int:
        return self.generation_windows * self.window_tokens

    @property
    def query_tokens(self) -> int:
        return self.prompt_windows * self.window_tokens + self.answer_tokens

    def measure_layer(self, layer: "PromptLayer", prompt_tokens: int) -> LayerNumbers:
        """Measure the two overlaps of every window in one layer.

        Args:
            layer: the layer with the states of prompt and answer.
            prompt_tokens: the length of the prompt.

        Returns:
            "overlap" and "overlap_of_common", from 0 to 1, by "prompt" or "answer" and the number
            of the window. Windows of the prompt count from ``-prompt_windows`` to -1, and those of
            the answer from 1.
        """
        import torch

        from snapkv_lab.study.measures import mean_attention, most_attended, overlap_share

        size, T = self.window_tokens, prompt_tokens
        starts = {
            **{("prompt", i): T + i * size for i in range(-self.prompt_windows, 0)},
            **{("answer", i + 1): T + i * size for i in range(self.generation_windows)},
        }
        candidates = {"overlap": T - size, "overlap_of_common": T - self.prompt_windows * size}
        attention = {
            window: mean_attention(layer, start, start + size, T - size)
            for window, start in starts.items()
        }
        answer = [a for (of, _), a in attention.items() if of == "answer"]
        mean_answer = torch.stack(answer).mean(dim=0)
        rows: LayerNumbers = {window: {} for window in starts}
        for name, tokens in candidates.items():
            keep_tokens = int(self.keep_ratio * tokens)
            ours = {w: most_attended(a[:, :tokens], keep_tokens) for w, a in attention.items()}
            against = {
                "prompt": most_attended(mean_answer[:, :tokens], keep_tokens),
                "answer": ours["prompt", -1],
            }
            for window in starts:
                rows[window][name] = overlap_share(against[window[0]], ours[window])
        return rows

    def table(self, rows: Sequence[Row]) -> Table:
        return Table(
            title="overlap of windows of the prompt with the answer, and of windows of the answer "
            "with the prompt's last: mean over layers (lowest to highest)",
            headings=("window", "overlap", "of common candidates"),
            rows=[
                (
                    f"{of} {window}",
                    *(format_range_over_layers(own, number) for number in self.numbers),
                )
                for (of, window), own in group_rows(rows, itemgetter("of", "window")).items()
            ],
            left=3,
        )

    def figure(self, rows: Sequence[Row]) -> Any:
        layers = group_by_label(select_rows(rows, of="prompt"), "layer", "layer {}")
        windows = group_by_label(select_rows(rows, of="answer"), "window", "answer {}")
        common = "The same, of positions that all windows see"
        return draw_curves(
            Panel("Windows of the prompt against the answer", "window", "overlap", layers),
            Panel(common, "window", "overlap_of_common", layers),
            Panel("The prompt's last window against the answer", "layer", "overlap", windows),
        )


@dataclass(frozen=True, kw_only=True)
class Instructions(ReadingStudy):
    """Whether other questions look at other parts of the same document.

    All questions are asked about every document. A question and its answer vote together, and each
    query head keeps the best part of the document. Every two questions are compared: which share of
    the first one's positions are the second one's too. The largest agreement that can be expected
    is measured with halves: the votes of every other token of one question are compared with those
    of the tokens between them, of the same question and of another one.

    Args:
        keep_ratio: the part of the document that is kept.
        answer_length: tokens of every answer.
    """

    name: ClassVar[str] = "instructions"
    by: ClassVar[tuple[str, ...]] = ("compared", "questions", "layer")
    numbers: ClassVar[tuple[str, ...]] = ("overlap", "overlap_of_halves")

    keep_ratio: float = 0.05
    answer_length: int = 64

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range, there are fewer than two questions, or
                no position would be kept.
            InvalidTypeError: a number is not an integer.
        """
        super().__post_init__()
        require_at_least("answer_length", self.answer_length, 1)
        if len(self.questions) < 2:
            problem = f"expected at least two questions, but got {len(self.questions)}"
            raise wrong("question", problem, "Ask another question")
        if not 0 < self.keep_ratio < 1 or int(self.keep_ratio * self.document_tokens) < 1:
            problem = f"{self.keep_ratio} is not at least one of {self.document_tokens:,} positions"
            raise wrong("keep_ratio", problem, "Pass 0.05")

    @property
    def answer_tokens(self) -> int:
        return self.answer_length

    def steps(self, texts: Sequence[tuple[str, str]]) -> Iterator[ReadingStep]:
        for name, text in texts:
            samples = tuple(self.sample(name, text, question) for question in self.questions)
            yield ReadingStep(name, "all", samples)

    def measure_step(
        self, loaded: "LoadedModel", step: ReadingStep, readings: Sequence[Reading]
    ) -> list[Row]:
        """Compare the positions that questions about one document select, for each layer and each
        pair of questions. Pairs of a question with itself are included; their overlap is 1, and
        that of the halves is the largest that can be expected.

        Args:
            loaded: the model, which reads every prompt and answer again.
            step: the step.
            readings: one for each question.

        Returns:
            A row for each layer and pair, with "compared", "questions", "layer", "overlap" and
            "overlap_of_halves", both from 0 to 1.
        """
        from snapkv_app.observing import observed
        from snapkv_lab.study.measures import overlap_share

        document = count_common_tokens([reading.ids[0].tolist() for reading in readings])
        measured = partial(self._votes, document=document)
        votes = [
            observed(loaded, reading.ids, reading.tokens - document, measured)
            for reading in readings
        ]
        pairs = list(itertools.combinations_with_replacement(range(len(readings)), 2))
        return [
            {
                "compared": "one question" if one == other else "different questions",
                "questions": f"{one + 1} and {other + 1}",
                "layer": layer,
                "overlap": overlap_share(votes[one][layer][0], votes[other][layer][0]),
                "overlap_of_halves": overlap_share(votes[one][layer][1], votes[other][layer][2]),
            }
            for layer in votes[0]
            for one, other in pairs
        ]

    def _votes(self, layer: "PromptLayer", document: int) -> "Tensor":
        """Return the positions that are selected by all queries, and by each half of them.

        Args:
            layer: the layer, with the queries after the document.
            document: the number of tokens at the beginning that all questions share.

        Returns:
            (3, Hq, document) bool: selected by all queries, by those at even, and by those at odd
            places after the document.
        """
        import torch

        from snapkv_lab.study.measures import attention_of_halves, most_attended

        halves = attention_of_halves(layer, document, layer.keys.shape[2], document)
        keep_tokens = int(self.keep_ratio * document)
        return torch.stack(
            [most_attended(votes, keep_tokens) for votes in (halves.sum(dim=0), *halves)]
        )

    def table(self, rows: Sequence[Row]) -> Table:
        return Table(
            title="overlap of selected positions: mean over layers (lowest to highest)",
            headings=("questions", "overlap", "of halves"),
            rows=[
                (questions, *(format_range_over_layers(own, number) for number in self.numbers))
                for questions, own in group_rows(rows, "questions").items()
            ],
            left=3,
        )

    def figure(self, rows: Sequence[Row]) -> Any:
        different = (row for row in rows if row["compared"] == "different questions")
        means = mean_rows(rows, ("compared", "layer"), ("overlap_of_halves",))
        halves = "Every other token against the rest"
        return draw_curves(
            Panel(
                "Different questions", "layer", "overlap", group_by_label(different, "questions")
            ),
            Panel(halves, "layer", "overlap_of_halves", group_by_label(means, "compared")),
        )


def count_common_tokens(texts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens at the beginning that all texts, at least one, have in common."""
    shortest = min(map(len, texts))
    together = zip(*texts, strict=False)
    return next((i for i, tokens in enumerate(together) if len(set(tokens)) > 1), shortest)
