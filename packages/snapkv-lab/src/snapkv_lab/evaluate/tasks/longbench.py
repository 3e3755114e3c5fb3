"""LongBench v1 (Bai et al., 2023) as it was published: the paper's Table 1.

Prompts, lengths, the removal of the middle, the sets without a chat template, and the metrics are
those of the published code, so that scores can be compared with published ones. The paper's own run
differs in the template (`--template longbench`), and in that no answer was empty (`--min-new-tokens
1`).
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

from snapkv.errors import DocumentError, MissingDependencyError, SnapKVError, wrong
from snapkv.validation import first_line, nearest, require_choice
from snapkv_app.packages import INSTALL, package_file
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate import metrics
from snapkv_lab.evaluate.corpora import Check, is_text_list, parse_json_lines
from snapkv_lab.evaluate.sample import Cell, Sample
from snapkv_lab.evaluate.task import Task
from snapkv_lab.rows import Row

HUB = "zai-org/LongBench"
"""The data set of the hub that holds `data.zip`. It was called THUDM/LongBench before."""

_LEAST_TOKENS = 64  # a half of a prompt then holds the end of a question
_TEMPLATE_TOKENS = 256  # room for a chat template, and for decoded text that gets more tokens


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
    axes: ClassVar[tuple[str, ...]] = ("dataset",)  # LongBench-E adds the length

    data: str | None = None
    datasets: tuple[str, ...] = ()
    extended: bool = False
    max_prompt_tokens: int | None = None
    min_new_tokens: int = 0
    code_similarity: metrics.CodeSimilarity = "difflib"

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a set is not known or not in LongBench-E, a number is out of
                range, or `code_similarity` is another word.
            InvalidTypeError: a number is not an integer.
        """
        if self.extended:
            object.__setattr__(self, "axes", ("dataset", "length"))
        choose_sets(self.datasets, extended=self.extended)
        self.require(min_new_tokens=0)
        if self.max_prompt_tokens is not None:
            self.require(max_prompt_tokens=_LEAST_TOKENS)
        require_choice("code_similarity", self.code_similarity, ("difflib", "levenshtein"))

    def for_model(self, name: str, max_tokens: int | None) -> Self:
        """Return a copy of the task with the maximum length of prompts for this model.

        Return the task itself if `max_prompt_tokens` is set already.
        """
        if self.max_prompt_tokens is not None:
            return self
        return replace(self, max_prompt_tokens=max_prompt_tokens(name, max_tokens))

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        data = hub_archive() if self.data is None else Path(self.data)
        for data_set in choose_sets(self.datasets, extended=self.extended):
            yield from self._samples(tokenizer, data, data_set)

    def score(self, sample: Sample, prediction: str) -> float:
        """Return the best score of the prediction over all right answers, from 0 to 1."""
        data_set = SETS[str(sample.cell["dataset"])]
        classes = sample.details["classes"]
        return data_set.score(prediction, sample.references, classes, self.code_similarity)

    def published(self, model: str) -> dict[str, dict[str, float]]:
        """Return the scores of the paper's Table 1 for the model.

        Returns:
            A dict of the scores, from 0 to 1, by data set, for each name of a method. It is empty
            if the table does not have the model, and for LongBench-E.
        """
        by_method = {} if self.extended else _PUBLISHED["published"].get(_model_key(model), {})
        return {
            method: {name: score / 100 for name, score in zip(SETS, scores, strict=True)}
            for method, scores in by_method.items()
        }

    def _samples(self, tokenizer: Any, data: Path, data_set: "DataSet") -> Iterator[Sample]:
        """Yield the samples of one data set, in the order of its file.

        Args:
            tokenizer: cuts prompts that are too long.
            data: the archive, or the folder of the files.
            data_set: the set.

        Raises:
            DocumentError: the file is missing or damaged, or a line has another form.
            MissingDependencyError: lm-eval is not installed, or its prompt cannot be restored.
        """
        before, after = prompt_format(data_set)
        rows = read_rows(data, data_set, extended=self.extended)
        settings = self._settings(tokenizer, data_set)
        for number, row in enumerate(rows, 1):
            context, question = before + row["context"], after.replace("{input}", row["input"])
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
                # the published code uses those of the last row
                details={"classes": tuple(rows[-1].get("all_classes") or ())},
            )

    def _settings(self, tokenizer: Any, data_set: "DataSet") -> GenerationSettings:
        """Return the settings with which answers are generated for a data set.

        A summary of a dialogue (samsum) ends at a line break, but has at least one token before it.
        The tokenizer says which token that is.
        """
        settings = GenerationSettings(
            max_new_tokens=data_set.max_new_tokens, min_new_tokens=self.min_new_tokens
        )
        if data_set.name != "samsum":
            return settings
        newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
        least = max(self.min_new_tokens, 1)
        return replace(settings, min_new_tokens=least, stop_token_ids=(newline,))


def max_prompt_tokens(model: str, max_tokens: int | None) -> int | None:
    """Return the largest number of tokens that a prompt for the model may have, or None if there is
    no limit.

    It is the published number if there is one. Otherwise it is the number of the model's positions
    without room for the longest answer and a chat template, but at least a half of them.

    Args:
        model: a hub id, or a folder; the last part of the name decides.
        max_tokens: the number of positions of the model; None if they are not limited.
    """
    published: int | None = _PUBLISHED["max_prompt_tokens"].get(_model_key(model))
    if published is not None or max_tokens is None:
        return published
    answer_tokens = max(one.max_new_tokens for one in SETS.values())
    return max(max_tokens - answer_tokens - _TEMPLATE_TOKENS, max_tokens // 2)


def _model_key(model: str) -> str:
    return PurePath(model).name.lower()


def cut_middle(
    tokenizer: Any, context: str, question: str, max_prompt_tokens: int
) -> tuple[str, str]:
    """Cut the middle out of a prompt that is too long, and return its context and its question.

    Both are returned unchanged if they have at most `max_prompt_tokens` tokens together. Otherwise
    the first and the last half of `max_prompt_tokens` tokens are decoded and joined, so the
    beginning with the instructions and the end with the question stay. If the question alone is
    longer than a half, its beginning is cut off too. The prompt is tokenized with special tokens.
    """
    ids = _encode(tokenizer, context + question)
    if len(ids) <= max_prompt_tokens:
        return context, question
    half = max_prompt_tokens // 2
    # The tokenizer may decode some characters of the question differently.
    head, tail, decoded_question = (
        tokenizer.decode(part, skip_special_tokens=True)
        for part in (ids[:half], ids[-half:], _encode(tokenizer, question))
    )
    place = len(head) + _start_of(decoded_question, tail)
    text = head + tail
    return text[:place], text[place:]


def _start_of(question: str, tail: str) -> int:
    """Return the index at which the question begins in a text that ends with it.

    It is 0 if the text is shorter than the question. White space is not compared, because a
    tokenizer decodes it differently after other text.
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
    """One of the data sets in LongBench, in English or with code.

    The file `longbench.toml` describes them.
    """

    name: str
    category: str
    metric: str
    max_new_tokens: int
    prompt_sha256: str

    @property
    def chat(self) -> bool:
        """Whether the prompt is wrapped in a chat template.

        Few-shot and code prompts are not.
        """
        return self.category not in ("few-shot learning", "code")

    @property
    def extended(self) -> bool:
        """Whether the set is also in LongBench-E."""
        return self.name not in ("narrativeqa", "musique", "qmsum")

    def score(
        self,
        prediction: str,
        references: Sequence[str],
        classes: Sequence[str],
        code_similarity: metrics.CodeSimilarity,
    ) -> float:
        """Return the best score of an answer over all right answers, from 0 to 1, by the metric of
        the data set.

        Args:
            prediction: the answer. For few-shot sets only its first line counts.
            references: the right answers; without any the score is 0.
            classes: the names of all classes, which only classification uses.
            code_similarity: how lines of code are compared, which only sets with code use.
        """
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
    """Return the data sets with the given names in the order of `SETS`, or all sets if there are no
    names.

    Args:
        names: the names of the sets.
        extended: whether only sets of LongBench-E are allowed.

    Raises:
        InvalidArgumentError: a set does not exist, or is not in LongBench-E.
    """
    available = {name: one for name, one in SETS.items() if one.extended or not extended}
    for name in names:
        if name not in available:
            which = "LongBench-E" if extended else "LongBench"
            known = ", ".join(available)
            problem = f"expected English or code sets of {which} ({known}), but got {name!r}"
            raise wrong("datasets", problem, nearest(name, available, "Use one of these names"))
    return [one for name, one in available.items() if name in names or not names]


def prompt_format(data_set: DataSet) -> tuple[str, str]:
    """Return the published prompt of a data set as two texts.

    The first comes before the document and the second after it, with ``{input}`` in it. The prompt
    is read from the installed lm-eval. The task files of 0.4.13 hold 10 of the 16 prompts as they
    were published; the other six lost an empty line or their end, which is restored. A prompt is
    only used if its hash is that of the published one.

    Raises:
        MissingDependencyError: lm-eval is not installed, or its prompt cannot be restored.
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
    for candidate in (text, repaired):
        if hashlib.sha256(candidate.encode()).hexdigest().startswith(data_set.prompt_sha256):
            before, _, after = candidate.partition("{context}")
            return before, after
    problem = f"the prompt of {name} in the installed lm-eval is not the published one"
    raise wrong("data", problem, f"Run {INSTALL['lm_eval']}", MissingDependencyError)


class _PlainLoader(yaml.SafeLoader):
    """A YAML loader that reads the tag `!function` as a string."""


_PlainLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def read_rows(data: Path, data_set: DataSet, *, extended: bool) -> list[Row]:
    """Read the rows of a data set in the order of the file.

    Each row has the fields context, input, answers and length, and sometimes all_classes.

    Args:
        data: the archive, or a folder that holds the ``.jsonl`` files directly or in a folder
            ``data``.
        data_set: the set.
        extended: whether to read LongBench-E.

    Raises:
        DocumentError: the file is missing or damaged, or a line has another form.
    """
    name = f"{data_set.name}_e.jsonl" if extended else f"{data_set.name}.jsonl"
    lines = _zipped_lines(data, name) if data.is_file() else _lines(data, name)
    fields = _FIELDS | _MORE_FIELDS.get(data_set.metric, {})
    return list(parse_json_lines(lines, fields, data / name, "Get the archive again").values())


def hub_archive() -> Path:
    """Download the archive of LongBench from the hub and return its path.

    It is not downloaded again if it is in the cache.

    Raises:
        DocumentError: the download failed.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(HUB, "data.zip", repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise wrong(
            "data",
            f"LongBench's archive cannot be downloaded from the hub: {first_line(error)[:120]!r}",
            f"Run hf download {HUB} data.zip --repo-type dataset --local-dir . where there is a "
            "network, and pass --data data.zip",
            DocumentError,
        ) from None


def _lines(folder: Path, name: str) -> Iterable[bytes]:
    """Return the lines of a file in the given folder, or else in a folder ``data`` inside it. Line
    ends are removed.

    Raises:
        DocumentError: there is no such file.
    """
    for path in (folder / name, folder / "data" / name):
        if path.is_file():
            return path.read_bytes().splitlines()
    raise _missing_file(folder, name)


def _zipped_lines(archive: Path, name: str) -> Iterable[bytes]:
    """Return the lines of the first file with the given name in a ZIP archive, in whatever folder
    of it. Line ends are removed.

    Raises:
        DocumentError: the archive is damaged, or has no such file.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            paths = map(PurePosixPath, opened.namelist())
            members = [p for p in paths if p.name == name and "__MACOSX" not in p.parts]
            if not members:
                raise _missing_file(archive, name)
            return opened.read(str(members[0])).splitlines()
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        problem = f"the archive {archive} could not be read: {error}"
        raise wrong(
            "data", problem, "Download the file again, or use a folder", DocumentError
        ) from None


def _missing_file(place: Path, name: str) -> SnapKVError:
    remedy = "Use --datasets to select the existing sets, or use the data.zip of LongBench"
    return wrong(
        "data", f"expected the file {name} in {place}, but got no such file", remedy, DocumentError
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
