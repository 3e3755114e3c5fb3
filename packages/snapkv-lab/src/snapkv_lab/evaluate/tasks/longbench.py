"""LongBench v1 (Bai et al., 2023) as it was published: the paper's Table 1.

Prompts, lengths, the cut through the middle, which sets get no chat template, metrics: all as in
the published code, so that scores can be compared with published ones. The paper's own run differs
from it in the template (`--template longbench`) and in that no answer was empty
(`--min-new-tokens 1`).
"""

import hashlib
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, ClassVar, Self

import yaml

from snapkv.app.settings import GenerationSettings
from snapkv.errors import DocumentError, InvalidArgumentError, MissingDependencyError
from snapkv.packages import INSTALL, package_file
from snapkv.validation import first_line, nearest, require_choice
from snapkv_lab.evaluate import metrics
from snapkv_lab.evaluate.corpora import Check, is_texts, parsed_lines
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
        chosen_sets(self.datasets, extended=self.extended)
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
        for data_set in chosen_sets(self.datasets, extended=self.extended):
            yield from self._samples(tokenizer, data, data_set)

    def score(self, sample: Sample, prediction: str) -> float:
        """The set's metric; the best over the right answers."""
        data_set = SETS[str(sample.cell["dataset"])]
        classes = sample.details["classes"]
        return data_set.score(prediction, sample.references, classes, self.code_similarity)

    def published(self, model: str) -> dict[str, dict[str, float]]:
        """The paper's Table 1; it has nothing on LongBench-E."""
        lines = [] if self.extended else _TABLE.get(_model_key(model), "").strip().splitlines()
        return {
            method: {
                name: float(score) / 100 for name, score in zip(SETS, line.split(), strict=True)
            }
            for method, line in zip(_METHODS, lines, strict=False)
        }

    def _samples(self, tokenizer: Any, data: Path, data_set: "DataSet") -> Iterator[Sample]:
        before, behind = prompt_format(data_set)
        rows = read_rows(data, data_set, extended=self.extended)
        settings = self._settings(tokenizer, data_set)
        for number, row in enumerate(rows, 1):
            context, question = before + row["context"], behind.replace("{input}", row["input"])
            if self.max_prompt_tokens is not None:
                context, question = truncated(tokenizer, context, question, self.max_prompt_tokens)
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
    known = _MAX_PROMPT_TOKENS.get(_model_key(model))
    if known is not None or max_tokens is None:
        return known
    answer_tokens = max(one.max_new_tokens for one in SETS.values())
    return max(max_tokens - answer_tokens - _TEMPLATE_TOKENS, max_tokens // 2)


def _model_key(model: str) -> str:
    return PurePath(model).name.lower()


def truncated(
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
    """One English or code set of LongBench.

    `category` is the paper's, `metric` a name of `score`, `prompt_sha256` the beginning of the hash
    of the published prompt, with ``{context}`` and ``{input}`` in their places.
    """

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
            "count": metrics.count,
            "retrieval": metrics.retrieval,
            "classification": partial(metrics.classification, classes=classes),
            "code similarity": partial(metrics.code_similarity, backend=code_similarity),
        }
        return metrics.best(measures[self.metric], prediction, references)


_SETS = (
    ("narrativeqa", "single-document QA", "F1", 128, "aada7ed24b06abac"),
    ("qasper", "single-document QA", "F1", 128, "0fbdd123fe7f83d6"),
    ("multifieldqa_en", "single-document QA", "F1", 64, "20b4666a2de8a1f7"),
    ("hotpotqa", "multi-document QA", "F1", 32, "9ec4ae308865bd0c"),
    ("2wikimqa", "multi-document QA", "F1", 32, "9ec4ae308865bd0c"),
    ("musique", "multi-document QA", "F1", 32, "9ec4ae308865bd0c"),
    ("gov_report", "summarization", "ROUGE-L", 512, "91c25d585b189ced"),
    ("qmsum", "summarization", "ROUGE-L", 512, "dca23b678fe0183b"),
    ("multi_news", "summarization", "ROUGE-L", 512, "2af3f28c40b902e6"),
    ("trec", "few-shot learning", "classification", 64, "0eff8bebdba99d91"),
    ("triviaqa", "few-shot learning", "F1", 32, "00a802e6377e72fc"),
    ("samsum", "few-shot learning", "ROUGE-L", 128, "a68d884234907eef"),
    ("passage_count", "synthetic", "count", 32, "986550b6c61009c6"),
    ("passage_retrieval_en", "synthetic", "retrieval", 32, "39b96b7fa52bdd2a"),
    ("lcc", "code", "code similarity", 64, "6a1f24cf0bb83cd9"),
    ("repobench-p", "code", "code similarity", 64, "ee9ec182ea5ffeb7"),
)

SETS: dict[str, DataSet] = {
    name: DataSet(
        name=name,
        category=category,
        metric=metric,
        max_new_tokens=max_new_tokens,
        prompt_sha256=prompt_sha256,
    )
    for name, category, metric, max_new_tokens, prompt_sha256 in _SETS
}
"""The 16 English and code sets by name, in the order of the paper's table."""


def chosen_sets(names: Sequence[str], *, extended: bool) -> list[DataSet]:
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


# What the paper's Table 1 says, and how its models were asked (Li et al., 2024, Sec. 5.3).
_METHODS = ("full", "snapkv@1024", "snapkv@2048", "snapkv@4096", "h2o@4096")

# A line per method, in the order of _METHODS; a column per set, in the order of SETS; percents.
_TABLE = {
    "lwm-text-chat-1m": """
    18.18 25.56 40.94 24.57 19.39 10.49 27.97 24.9 24.81 71.0 60.9 39.73 3.17 3.5 44.4 43.82
    18.02 23.73 40.25 24.61 19.84 10.77 19.79 24.44 23.53 70.0 61.42 39.64 1.67 3.0 43.34 44.0
    17.92 25.03 41.38 24.49 19.38 11.34 21.6 24.22 24.36 70.0 61.11 39.91 2.17 4.0 44.46 44.92
    17.92 25.47 40.76 24.92 19.53 11.27 25.34 25.42 24.58 70.5 61.08 39.62 3.17 4.0 44.49 44.08
    13.17 24.82 20.01 16.86 9.74 7.2 25.77 23.26 23.83 71.0 61.06 40.33 0.0 0.0 41.52 40.97
    """,
    "longchat-7b-v1.5-32k": """
    20.88 29.36 43.2 33.05 24.58 14.66 30.89 22.76 26.61 66.5 83.99 40.83 0.0 30.5 54.89 59.05
    19.32 26.6 37.93 34.15 23.34 12.71 23.45 21.81 24.93 65.0 80.88 38.19 0.0 31.0 53.63 57.62
    19.28 28.81 40.26 35.31 23.75 13.44 26.3 22.29 25.73 66.0 79.93 39.59 0.0 31.0 56.05 58.61
    20.68 29.34 42.21 33.95 24.88 14.15 28.55 23.11 26.45 66.0 81.25 40.52 0.0 29.5 54.79 58.81
    19.31 28.3 37.75 30.51 23.06 11.76 27.55 21.37 26.49 66.0 75.8 39.92 0.0 25.5 53.56 55.53
    """,
    "mistral-7b-instruct-v0.2": """
    26.82 33.06 49.28 42.77 27.33 19.27 32.85 24.25 27.06 71.0 86.23 42.98 2.75 86.98 55.51 52.88
    25.54 29.51 49.25 40.94 25.7 19.42 25.89 23.82 26.11 69.5 86.48 42.06 2.98 88.56 55.65 51.87
    25.89 32.47 48.6 41.71 27.31 18.69 28.81 24.5 26.6 70.0 86.27 42.47 3.09 87.43 55.93 52.01
    26.41 33.36 49.81 42.32 27.93 18.76 30.74 24.19 27.08 71.0 86.25 43.01 2.73 86.18 55.62 52.65
    22.61 29.06 47.22 36.54 20.6 16.25 30.0 23.8 26.75 70.5 86.16 42.97 3.46 86.38 53.72 51.1
    """,
    "mixtral-8x7b-instruct-v0.1": """
    26.81 37.06 51.55 47.77 32.46 26.59 34.25 26.05 27.91 76.0 90.57 46.98 5.5 100.0 69.07 69.65
    26.01 34.65 51.58 48.23 32.67 25.92 27.77 25.0 27.25 74.5 90.42 46.48 5.5 99.5 69.02 68.98
    27.12 36.9 51.91 47.46 33.23 26.27 30.19 25.84 27.8 76.0 90.24 46.31 5.5 100.0 68.72 70.01
    26.46 37.03 52.62 47.71 33.35 26.45 32.64 25.87 27.94 75.5 90.71 47.14 5.5 100.0 68.81 69.56
    20.45 32.09 48.02 34.76 25.69 16.5 29.76 23.53 26.84 74.5 90.24 47.1 7.06 99.42 64.91 63.52
    """,
}

_MAX_PROMPT_TOKENS = {
    "lwm-text-chat-1m": 1_048_576,
    "longchat-7b-v1.5-32k": 31_500,
    "mistral-7b-instruct-v0.2": 31_500,
    "mixtral-8x7b-instruct-v0.1": 31_500,
    "llama-2-7b-chat-hf": 3_500,
    "vicuna-7b-v1.5-16k": 15_500,
}


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
    return parsed_lines(lines, fields, data / name, "get the archive again")


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
    raise _missing(folder, name)


def _zipped_lines(archive: Path, name: str) -> Iterable[bytes]:
    try:
        with zipfile.ZipFile(archive) as opened:
            paths = map(PurePosixPath, opened.namelist())
            members = [p for p in paths if p.name == name and "__MACOSX" not in p.parts]
            if not members:
                raise _missing(archive, name)
            return opened.read(str(members[0])).splitlines()
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DocumentError(
            f"data: expected LongBench's data.zip or a folder, got {archive}, of which no archive "
            f"can be read ({error}); download it again"
        ) from None


def _missing(place: Path, name: str) -> DocumentError:
    return DocumentError(
        f"data: expected {name} in {place}, got no such file; name the sets that are there with "
        "--datasets, or pass LongBench's data.zip"
    )


def _are_answers(value: Any) -> bool:
    return is_texts(value) and bool(value)


def _are_paragraphs(value: Any) -> bool:
    return _are_answers(value) and all(re.search(metrics.PARAGRAPH, each) for each in value)


_FIELDS: dict[str, Check] = {
    "context": ("a text", lambda value: isinstance(value, str) and bool(value)),
    "input": ("a text", lambda value: isinstance(value, str)),
    "answers": ("a list of texts", _are_answers),
    "length": ("a whole number", lambda value: type(value) is int),
    "all_classes": ("a list of texts or null", lambda value: value is None or is_texts(value)),
}
_MORE_FIELDS: dict[str, dict[str, Check]] = {
    "classification": {"all_classes": ("a list of texts", _are_answers)},
    "retrieval": {"answers": ('texts like "Paragraph 3"', _are_paragraphs)},
}
