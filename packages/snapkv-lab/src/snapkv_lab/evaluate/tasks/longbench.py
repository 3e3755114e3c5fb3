"""LongBench v1 (Bai et al., 2023) as it was published: the paper's Table 1.

Prompts, lengths, the cut through the middle, which sets get no chat template, metrics: all as in
the published code, so that scores can be compared with published ones. The paper's own run differs
from it in the template (`--template longbench`) and in that no answer was empty
(`--min-new-tokens 1`).
"""

import hashlib
import re
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, ClassVar, Self

import yaml

from snapkv.errors import DocumentError, InvalidArgumentError, MissingDependencyError
from snapkv.validation import first_line, nearest, require_choice
from snapkv_app.packages import INSTALL, package_file
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate import metrics
from snapkv_lab.evaluate.corpora import Check, is_text_list, parse_json_lines
from snapkv_lab.evaluate.sample import Cell, Sample
from snapkv_lab.evaluate.task import Task
from snapkv_lab.rows import Row

HUB = "zai-org/LongBench"
"""The hub's data set that holds `data.zip`; THUDM/LongBench before it was renamed."""

_LEAST_TOKENS = 64  # of a prompt, so that a half holds the end of a question
_TEMPLATE_TOKENS = 256  # for a chat template, and for text with more tokens when it is read again


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
    code_similarity: metrics.CodeSimilarity = "difflib"

    def __post_init__(self) -> None:
        if self.extended:
            object.__setattr__(self, "axes", ("dataset", "length"))
        choose_sets(self.datasets, extended=self.extended)
        self.require(min_new_tokens=0)
        if self.max_prompt_tokens is not None:
            self.require(max_prompt_tokens=_LEAST_TOKENS)
        require_choice("code_similarity", self.code_similarity, ("difflib", "levenshtein"))

    def for_model(self, name: str, max_tokens: int | None) -> Self:
        """The task with the length that the model's prompts are cut to."""
        if self.max_prompt_tokens is not None:
            return self
        return replace(self, max_prompt_tokens=max_prompt_tokens(name, max_tokens))

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        data = hub_archive() if self.data is None else Path(self.data)
        for data_set in choose_sets(self.datasets, extended=self.extended):
            yield from self._samples(tokenizer, data, data_set)

    def score(self, sample: Sample, prediction: str) -> float:
        """The set's metric; the best over the right answers."""
        data_set = SETS[str(sample.cell["dataset"])]
        classes = sample.details["classes"]
        return data_set.score(prediction, sample.references, classes, self.code_similarity)

    def published(self, model: str) -> dict[str, dict[str, float]]:
        """The paper's Table 1; it has nothing on LongBench-E."""
        found = {} if self.extended else _PUBLISHED["published"].get(_model_key(model), {})
        return {
            method: {name: score / 100 for name, score in zip(SETS, scores, strict=True)}
            for method, scores in found.items()
        }

    def _samples(self, tokenizer: Any, data: Path, data_set: "DataSet") -> Iterator[Sample]:
        before, behind = prompt_format(data_set)
        rows = read_rows(data, data_set, extended=self.extended)
        settings = self._settings(tokenizer, data_set)
        for number, row in enumerate(rows, 1):
            context, question = before + row["context"], behind.replace("{input}", row["input"])
            if self.max_prompt_tokens is not None:
                context, question = cut_middle(tokenizer, context, question, self.max_prompt_tokens)
            cell: Cell = {"dataset": data_set.name}
            if self.extended:
                words = row["length"]
                cell["length"] = "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"
            yield Sample(
                name=f"{data_set.name}/{number}",
                cell=cell,
                context=context,
                question=question,
                references=tuple(row["answers"]),
                settings=settings,
                chat=data_set.chat,
                # as published: of the last row
                details={"classes": tuple(rows[-1].get("all_classes") or ())},
            )

    def _settings(self, tokenizer: Any, data_set: "DataSet") -> GenerationSettings:
        """How a set is answered; dialogues are summarised on one line that is not empty."""
        settings = GenerationSettings(
            max_new_tokens=data_set.max_new_tokens, min_new_tokens=self.min_new_tokens
        )
        if data_set.name != "samsum":
            return settings
        newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
        least = max(self.min_new_tokens, 1)
        return replace(settings, min_new_tokens=least, stop_token_ids=(newline,))


def max_prompt_tokens(model: str, max_tokens: int | None) -> int | None:
    """What prompts are cut to: the published number, or what the model's positions leave room for.

    `model` is a hub id, or a folder of that name; None is no limit.
    """
    known: int | None = _PUBLISHED["max_prompt_tokens"].get(_model_key(model))
    if known is not None or max_tokens is None:
        return known
    answer_tokens = max(one.max_new_tokens for one in SETS.values())
    return max(max_tokens - answer_tokens - _TEMPLATE_TOKENS, max_tokens // 2)


def _model_key(model: str) -> str:
    return PurePath(model).name.lower()


def cut_middle(
    tokenizer: Any, context: str, question: str, max_prompt_tokens: int
) -> tuple[str, str]:
    """Context and question of a prompt without its middle, or as they are where that fits.

    Its beginning holds the instructions and its end the question, so both stay. The prompt is read
    with the tokenizer's special tokens; of its ids the first and the last half of
    `max_prompt_tokens` are turned into text again and joined. Where the question alone is longer
    than a half, its beginning is cut off too.
    """
    ids = _encode(tokenizer, context + question)
    if len(ids) <= max_prompt_tokens:
        return context, question
    half = max_prompt_tokens // 2
    # The tokenizer may give back some characters of the question by others.
    head, tail, asked = (
        tokenizer.decode(part, skip_special_tokens=True)
        for part in (ids[:half], ids[-half:], _encode(tokenizer, question))
    )
    place = len(head) + _start_of(asked, tail)
    text = head + tail
    return text[:place], text[place:]


def _start_of(question: str, tail: str) -> int:
    """Where a question begins that a text ends with, or 0 where the text is only a part of it.

    White space is not compared: what a tokenizer gives back of it depends on what stands before.
    """
    letters = sum(not character.isspace() for character in question)
    place = len(tail)
    while letters and place:
        place -= 1
        letters -= not tail[place].isspace()
    return place


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=False, verbose=False)["input_ids"]
    return ids


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One English or code set of LongBench, as `longbench.toml` says."""

    name: str
    category: str
    metric: str
    max_new_tokens: int
    prompt_sha256: str

    @property
    def chat(self) -> bool:
        """Whether its prompt is wrapped in a chat template; few-shot and code prompts are not."""
        return self.category not in ("few-shot learning", "code")

    @property
    def extended(self) -> bool:
        """Whether LongBench-E has it too."""
        return self.name not in ("narrativeqa", "musique", "qmsum")

    def score(
        self,
        prediction: str,
        references: Sequence[str],
        classes: Sequence[str],
        code_similarity: metrics.CodeSimilarity,
    ) -> float:
        """The best score over the right answers, 0 to 1; of examples, the first line's."""
        if self.category == "few-shot learning":
            prediction = metrics.first_line(prediction)
        measures: dict[str, metrics.Metric] = {
            "F1": metrics.qa_f1,
            "ROUGE-L": metrics.rouge_l,
            "count": metrics.count_score,
            "retrieval": metrics.retrieval_score,
            "classification": partial(metrics.classification_score, classes=classes),
            "code similarity": partial(metrics.code_similarity, backend=code_similarity),
        }
        return metrics.best_score(measures[self.metric], prediction, references)


_PUBLISHED: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("longbench.toml").read_text("utf-8")
)
SETS = {name: DataSet(name=name, **own) for name, own in _PUBLISHED["sets"].items()}
"""The 16 English and code sets by name, in the order of the paper's table."""


def choose_sets(names: Sequence[str], *, extended: bool) -> list[DataSet]:
    """The sets of those names in the table's order; all that there are for no names."""
    known = {name: one for name, one in SETS.items() if one.extended or not extended}
    for name in names:
        if name not in known:
            which = "LongBench-E" if extended else "LongBench"
            raise InvalidArgumentError(
                f"datasets: expected English or code sets of {which}, got {name!r}"
                f"{nearest(name, known) or '; there are ' + ', '.join(known)}"
            )
    return [one for name, one in known.items() if name in names or not names]


def prompt_format(data_set: DataSet) -> tuple[str, str]:
    """The published prompt of a set: before a document, and after it with ``{input}`` in it.

    It is read out of the installed lm-eval. The task files of 0.4.13 hold 10 of the 16 prompts as
    they were published; the other six lost an empty line or what they end with, which is put back.
    Whatever the release, a prompt is only used if its hash is that of the published one.
    """
    name = data_set.name
    path = package_file("lm_eval", "tasks", "longbench", f"{name}.yaml")
    task: dict[str, Any] = yaml.load(path.read_text("utf-8"), _PlainLoader)
    text = str(task.get("doc_to_text"))
    text = text.replace("{{context}}", "{context}").replace("{{question}}", "{input}")
    repaired = text
    if name in ("triviaqa", "samsum"):
        repaired = text.replace("{context}\n{input}", "{context}\n\n{input}")
    elif name in ("passage_count", "passage_retrieval_en", "lcc", "repobench-p"):
        repaired += " " if name.startswith("passage") else "\n"
    for found in (text, repaired):
        if hashlib.sha256(found.encode()).hexdigest().startswith(data_set.prompt_sha256):
            before, _, behind = found.partition("{context}")
            return before, behind
    raise MissingDependencyError(
        f"data: expected the published prompt of {name} in the installed lm-eval, got another one; "
        f"run {INSTALL['lm_eval']}"
    )


class _PlainLoader(yaml.SafeLoader):
    """A safe loader that leaves lm-eval's `!function` the name that it is."""


_PlainLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def read_rows(data: Path, data_set: DataSet, *, extended: bool) -> list[Row]:
    """The rows of a set in the file's order: context, input, answers, length, all_classes.

    `data` is the archive, or a folder with the ``.jsonl`` files or a folder ``data`` of them.
    """
    name = f"{data_set.name}_e.jsonl" if extended else f"{data_set.name}.jsonl"
    lines = _zipped_lines(data, name) if data.is_file() else _lines(data, name)
    fields = _FIELDS | _MORE_FIELDS.get(data_set.metric, {})
    return list(parse_json_lines(lines, fields, data / name, "get the archive again").values())


def hub_archive() -> Path:
    """LongBench's `data.zip`, downloaded from the hub where it is not in the cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(HUB, "data.zip", repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DocumentError(
            f"data: expected LongBench's archive from the hub, got {first_line(error)[:120]!r}; "
            f"where there is a network run hf download {HUB} data.zip --repo-type dataset "
            "--local-dir . and pass --data data.zip"
        ) from None


def _lines(folder: Path, name: str) -> Iterable[bytes]:
    for path in (folder / name, folder / "data" / name):
        if path.is_file():
            return path.read_bytes().splitlines()
    raise _missing_file(folder, name)


def _zipped_lines(archive: Path, name: str) -> Iterable[bytes]:
    try:
        with zipfile.ZipFile(archive) as opened:
            paths = map(PurePosixPath, opened.namelist())
            members = [p for p in paths if p.name == name and "__MACOSX" not in p.parts]
            if not members:
                raise _missing_file(archive, name)
            return opened.read(str(members[0])).splitlines()
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DocumentError(
            f"data: expected LongBench's data.zip or a folder, got {archive}, of which no archive "
            f"can be read ({error}); download it again"
        ) from None


def _missing_file(place: Path, name: str) -> DocumentError:
    return DocumentError(
        f"data: expected {name} in {place}, got no such file; name the sets that are there with "
        "--datasets, or pass LongBench's data.zip"
    )


def _are_answers(value: Any) -> bool:
    return is_text_list(value) and bool(value)


def _are_paragraphs(value: Any) -> bool:
    return _are_answers(value) and all(re.search(metrics.PARAGRAPH, each) for each in value)


_FIELDS: dict[str, Check] = {
    "context": ("a text", lambda value: isinstance(value, str) and bool(value)),
    "input": ("a text", lambda value: isinstance(value, str)),
    "answers": ("a list of texts", _are_answers),
    "length": ("a whole number", lambda value: type(value) is int),
    "all_classes": ("a list of texts or null", lambda value: value is None or is_text_list(value)),
}
_MORE_FIELDS: dict[str, dict[str, Check]] = {
    "classification": {"all_classes": ("a list of texts", _are_answers)},
    "retrieval": {"answers": ('texts like "Paragraph 3"', _are_paragraphs)},
}
