"""LongBench v1 (Bai et al., 2023) as it was published: the paper's Table 1.

Prompts, lengths, the cut through the middle, which sets get no chat template, metrics: all as in
the published code, so that scores can be set beside published ones. The paper's own run differs
from it in the template (`--template longbench`) and in that no answer was empty
(`--min-new-tokens 1`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least
from snapkv_lab.evaluate.longbench.prompts import prompt_format
from snapkv_lab.evaluate.longbench.published import max_prompt_tokens, scores
from snapkv_lab.evaluate.longbench.rows import hub_archive, read_rows
from snapkv_lab.evaluate.longbench.sets import SETS, DataSet, chosen_sets
from snapkv_lab.evaluate.longbench.truncation import truncated
from snapkv_lab.evaluate.metrics import CodeSimilarity
from snapkv_lab.evaluate.sample import Cell, Sample
from snapkv_lab.evaluate.task import Task

_LEAST_TOKENS = 64  # of a prompt, so that a half holds the end of a question


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """Questions about long texts, summaries and code completion: LongBench's 16 sets.

    Args:
        data: LongBench's data.zip or a folder of its .jsonl files; without one, from the hub.
        datasets: which sets; without any, all that there are.
        extended: LongBench-E, with scores by length.
        max_prompt_tokens: longer prompts lose their middle; without it, what the model has room
            for, and for the paper's models what was published.
        min_new_tokens: an answer does not end before it has that many.
        code_similarity: levenshtein gives the numbers of fuzzywuzzy with python-Levenshtein.
    """

    name: ClassVar[str] = "longbench"
    metric: ClassVar[str] = "score"
    axes: ClassVar[tuple[str, ...]] = ("dataset",)  # and the length, where it is extended

    data: str | None = None
    datasets: tuple[str, ...] = ()
    extended: bool = False
    max_prompt_tokens: int | None = None
    min_new_tokens: int = 0
    code_similarity: CodeSimilarity = "difflib"

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.extended:
            object.__setattr__(self, "axes", ("dataset", "length"))
        chosen_sets(self.datasets, extended=self.extended)
        require_at_least("min_new_tokens", self.min_new_tokens, 0)
        if self.max_prompt_tokens is not None:
            require_at_least("max_prompt_tokens", self.max_prompt_tokens, _LEAST_TOKENS)
        if self.code_similarity not in ("difflib", "levenshtein"):
            raise InvalidArgumentError(
                f"code_similarity: expected difflib or levenshtein, got {self.code_similarity!r}"
            )

    def for_model(self, name: str, max_tokens: int | None) -> Self:
        """The task with the length that the model's prompts are cut to."""
        if self.max_prompt_tokens is not None:
            return self
        return replace(self, max_prompt_tokens=max_prompt_tokens(name, max_tokens))

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Every row of every set, in the table's order."""
        data = hub_archive() if self.data is None else Path(self.data)
        for data_set in chosen_sets(self.datasets, extended=self.extended):
            yield from self._samples(tokenizer, data, data_set)

    def score(self, sample: Sample, prediction: str) -> float:
        """The set's metric; the best over the right answers."""
        data_set = SETS[str(sample.cell["dataset"])]
        classes = sample.details["classes"]
        return data_set.score(prediction, sample.references, classes, self.code_similarity)

    def published(self, model: str) -> dict[str, dict[str, float]]:
        """The paper's Table 1; it has nothing on LongBench-E."""
        return {} if self.extended else scores(model)

    def _samples(self, tokenizer: Any, data: Path, data_set: DataSet) -> Iterator[Sample]:
        shape = prompt_format(data_set)
        rows = read_rows(data, data_set, extended=self.extended)
        settings = self._settings(tokenizer, data_set)
        for number, row in enumerate(rows, 1):
            context, question = shape.context(row.context), shape.question(row.input)
            if self.max_prompt_tokens is not None:
                context, question = truncated(tokenizer, context, question, self.max_prompt_tokens)
            cell: Cell = {"dataset": data_set.name}
            if self.extended:
                cell["length"] = _bucket(row.length)
            yield Sample(
                name=f"{data_set.name}/{number}",
                cell=cell,
                context=context,
                question=question,
                references=row.answers,
                settings=settings,
                chat=data_set.chat,
                details={"classes": rows[-1].all_classes},  # as published: of the last row
            )

    def _settings(self, tokenizer: Any, data_set: DataSet) -> GenerationSettings:
        """How a set is answered; dialogues are summarised on one line that is not empty."""
        settings = GenerationSettings(
            max_new_tokens=data_set.max_new_tokens, min_new_tokens=self.min_new_tokens
        )
        if data_set.name != "samsum":
            return settings
        newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
        least = max(self.min_new_tokens, 1)
        return replace(settings, min_new_tokens=least, stop_token_ids=(newline,))


def _bucket(words: int) -> str:
    """LongBench-E's classes of length."""
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"
