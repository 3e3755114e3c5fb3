"""Documents that were read once: how soon the first token comes, and whether answers stay right.

Ten documents of Python's standard library and thirty questions, written by hand, whose answers
stand word for word in them. Every document is read once for every way of keeping it, and saved. For
every question the files of four documents are loaded and joined; the same four are also read in
full, in an order that turns from question to question. The right answer is then fed to the model:
it counts as right where each of its tokens is the most likely.
"""

import importlib
import inspect
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapkv import AdaKV, CompressedCache, FullCache, KVzip, SnapKV
from snapkv.hf.cache_argument import passed
from snapkv.kvzip import instruction_of, read_twice
from snapkv.policies import Policy
from snapkv_app.library import Part, blend
from snapkv_app.models import LoadedModel
from snapkv_lab.evaluate.haystack import token_ids
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.library_size import rows_by_size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.measure.timing import pair_ratios
from snapkv_lab.rows import Row, group_rows, read_rows

QUESTIONS = Path(__file__).with_name("library_questions.jsonl")
SEED, DOCUMENTS_EACH = 19, 4
PREFIX = "Answer the question at the end from the documents below.\n\n"
_EXAMPLES = (
    "Question: What is the capital of France?\nAnswer: Paris\n\n"
    "Question: Who wrote the play Hamlet?\nAnswer: William Shakespeare\n\n"
)


class DocumentQuestion(NamedTuple):
    """A question about several documents and its right answer."""

    documents: Sequence[str]
    question: str
    answer: str


def python_questions(count: int) -> list[DocumentQuestion]:
    """Return the first `count` questions written by hand, each with four documents in random order:
    the one that answers it, and three others. Equal counts give equal questions.
    """
    rows, draw = read_rows(QUESTIONS), random.Random(SEED)
    texts = {name: module_text(name) for name in dict.fromkeys(row["document"] for row in rows)}
    questions = []
    for row in rows[:count]:
        free = [name for name in texts if name != row["document"]]
        own = [row["document"], *draw.sample(free, DOCUMENTS_EACH - 1)]
        documents = [texts[name] for name in draw.sample(own, DOCUMENTS_EACH)]
        lead = f" {row['lead']}" if row["lead"] else ""
        question = f"{_EXAMPLES}Question: {row['question']}\nAnswer:{lead}"
        questions.append(DocumentQuestion(documents, question, f" {row['answer']}"))
    return questions


def module_text(name: str) -> str:
    """Return the docstring of a module of Python's standard library as a document.

    The module is imported. A line with its name comes first.
    """
    text = inspect.getdoc(importlib.import_module(name)) or ""
    return f"Document: the module {name}\n{text.strip()}\n\n"


class Way(NamedTuple):
    """A way to store a document, with a policy and the number of bits."""

    name: str
    policy: Policy
    bits: Any = None


class JoinMethod(NamedTuple):
    """A method for loading the documents of a question into a cache.

    Attributes:
        name: the name in tables.
        way: how the documents are stored; None if they are read in full.
        recompute: the share of tokens that is computed again, see `blend`.
        policy: what is kept of the documents for the question.
    """

    name: str
    way: Way | None
    recompute: float = 0.0
    policy: Policy = FullCache()


_WHOLE = Way("whole", FullCache())
_KVZIP = KVzip(keep_ratio=0.3)
_FULL = JoinMethod("read in full", None)
FEW = [_FULL, *(JoinMethod(f"whole, {part:g}", _WHOLE, part) for part in (0, 0.1, 0.2, 0.4))]
METHODS = [
    *FEW,
    JoinMethod("whole, int8, 0.2", Way("whole, int8", FullCache(), "int8"), 0.2),
    JoinMethod("KVzip 0.3, 0.2", Way("KVzip 0.3", _KVZIP), 0.2),
    JoinMethod("KVzip 0.3 by head, 0.2", Way("KVzip 0.3 by head", AdaKV(_KVZIP)), 0.2),
    JoinMethod("whole, 0.2, then snapkv 512", _WHOLE, 0.2, SnapKV(512, window_size=16)),
]


IN_BITS = [
    _FULL,
    *FEW[1:4:2],
    *(
        JoinMethod(f"whole, {bits}, {part:g}", Way(f"whole, {bits}", FullCache(), bits), part)
        for bits, parts in (("int8", [0]), ("K8V4", [0]), ("int4", [0, 0.2]))
        for part in parts
    ),
]
"""The methods of the table about bits. If nothing is computed again, all answers come from
codes.
"""


class Shelf:
    """The documents of one model in a folder. Each is read once for every way to store it.

    `prefix` has the token ids of the text before the documents, (1, T) int64.
    """

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self.loaded, self.folder = loaded, folder
        self.prefix = self.ids(PREFIX)
        self._files: dict[tuple[str, str], Path] = {}

    def ids(self, *texts: str) -> Tensor:
        """Return the token ids of all texts one after the other, (1, T) int64.

        Each text is tokenized by itself, without special tokens.
        """
        own = (token for text in texts for token in token_ids(self.loaded.tokenizer, text))
        return torch.tensor([list(own)])

    def file(self, text: str, way: Way) -> Path:
        """Return the path of the file in which a document is stored. The document is read and saved
        by the first call for it.

        Args:
            text: the document.
            way: how it is stored. Two ways with the same name count as the same way.
        """
        key = (text, way.name)
        if key not in self._files:
            path = self.folder / f"{len(self._files)}"
            ids = torch.cat([self.prefix, self.ids(text)], dim=1)
            self._read(ids, way).save(path, beside={"input_ids": ids}, bits=way.bits)
            self._files[key] = path
        return self._files[key]

    def _read(self, ids: Tensor, way: Way) -> CompressedCache:
        """Read a document that follows the prefix, and return its compressed cache. All heads keep
        the whole prefix, so that they hold equally many of its tokens.

        Args:
            ids: (1, T) int64, the tokens of the prefix and the document.
            way: the policy, which may need a second reading.
        """
        model, is_full = self.loaded.model, isinstance(way.policy, FullCache)
        protect = None if is_full else [(0, self.prefix.shape[1])]
        cache = CompressedCache(model, way.policy, protect=protect)
        if way.policy.needs_reconstruction_pass:
            instruction = instruction_of(self.loaded.tokenizer)
            read_twice(model, ids, cache, instruction_ids=instruction)
        else:
            model(ids, **passed(cache), logits_to_keep=1)
        return cache

    def _part(self, text: str, way: Way) -> Part:
        cache, tensors = CompressedCache.load_with(self.file(text, way), self.loaded.model)
        return Part(input_ids=tensors["input_ids"], cache=cache, prefix_tokens=self.prefix.shape[1])

    def read(self, case: DocumentQuestion, method: JoinMethod) -> tuple[CompressedCache, Tensor]:
        """Build a cache that has read the documents and the question of a case, and compute the
        logits of the next token.

        If the documents are not stored in the method's way yet, they are read and saved first.

        Returns:
            The cache, and the (1, 1, V) logits, for the V tokens of the vocabulary.
        """
        model, question = self.loaded.model, self.ids(case.question)
        if method.way is None:
            cache = CompressedCache(model, method.policy)
            question = self.ids(PREFIX, *case.documents, case.question)
        else:
            parts = [self._part(text, method.way) for text in case.documents]
            cache = blend(model, parts, method.policy, recompute=method.recompute)
        logits: Tensor = model(question, **passed(cache), logits_to_keep=1).logits
        return cache, logits


@torch.inference_mode()
def answer_question(shelf: Shelf, case: DocumentQuestion, method: JoinMethod) -> Row:
    """Feed the right answer to a cache of the documents, and return a row about it.

    Documents that are not stored yet are read and saved first, which is not timed.

    Returns:
        "seconds" until the logits of the first token, "loss" (nats per token), "right" (whether
        each token is the most likely one), and "kept_tokens".
    """
    for text in case.documents:
        if method.way is not None:
            shelf.file(text, method.way)
    answer, started = shelf.ids(case.answer), time.perf_counter()
    cache, logits = shelf.read(case, method)
    seconds = time.perf_counter() - started
    if answer.shape[1] > 1:
        after = shelf.loaded.model(answer[:, :-1], **passed(cache)).logits
        logits = torch.cat([logits, after], dim=1)
    chances = logits.log_softmax(dim=-1).gather(2, answer[..., None])
    return {
        "seconds": round(seconds, 4),
        "loss": round(-float(chances.mean()), 4),
        "right": bool((logits.argmax(dim=-1) == answer).all()),
        "kept_tokens": cache.report().kept_tokens,
    }


def _measure_answers(
    group: str, methods: Sequence[JoinMethod], context: RunContext
) -> Iterator[Row]:
    """Yield one row for each question, and then one for the files of each way to store documents.

    Args:
        group: the name of the part, which all rows have.
        methods: the methods that are compared; the first one warms up.
        context: the run, with the number of questions.
    """
    questions = python_questions(context.questions)
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(context.loaded, Path(folder))
        answer_question(shelf, questions[0], methods[0])  # warms up
        for number, case in enumerate(questions):
            turn = number % len(methods)
            order = [*methods[turn:], *methods[:turn]]
            answers = {method.name: answer_question(shelf, case, method) for method in order}
            ids = shelf.ids(PREFIX), *map(shelf.ids, case.documents), shelf.ids(case.question)
            yield {
                "benchmark": "library",
                "group": group,
                "question": case.question.splitlines()[-2],
                "documents": len(case.documents),
                "prompt_tokens": sum(each.shape[1] for each in ids),
                "answers": {method.name: answers[method.name] for method in methods},
            }
        texts = list(dict.fromkeys(text for case in questions for text in case.documents))
        for way in {each.way.name: each.way for each in methods if each.way is not None}.values():
            yield {
                "benchmark": "library",
                "group": group,
                "way": way.name,
                "files": len(texts),
                "bytes": sum(shelf.file(text, way).stat().st_size for text in texts),
                "tokens": sum(shelf.prefix.shape[1] + shelf.ids(text).shape[1] for text in texts),
            }


_TITLES = {
    "python": "Documents of Python",
    "bits": "Documents of Python in few bits",
    "many": "The folder by the number of documents",
}
_SIZES = {
    "documents": "{documents:,}",
    "adding each": "{add_ms:.1f} ms",
    "first search after that": "{first_search_seconds:.2f} s",
    "opening, with a search": "{opening_seconds:.3f} s",
    "search": "{search_ms:.1f} ms",
    "slowest of 100": "{slowest_search_ms:.1f} ms",
    "record": "{record_bytes:,} bytes",
    "index, a document": "{index_bytes:,} bytes",
}
_ANSWERS = {
    "kept, and read again": "{name}",
    "to the first token": "{seconds:.2f} s",
    "of reading in full": "{share:.2f}",
    "right": "{right} of {asked}",
    "of those right in full": "{kept} of {known}",
    "loss": "{loss:.3f}",
    "tokens held": "{tokens:,.0f}",
}


def _tables(rows: list[Row]) -> Iterator[str]:
    """Yield the headings and tables of all groups, in Markdown."""
    for group, own in group_rows(rows, "group").items():
        if group == "many":
            yield from Listing(_SIZES, _TITLES[group]).parts(own)
            continue
        ways = [row for row in own if "way" in row]
        answered = [row for row in own if "answers" in row]
        yield from Listing(_ANSWERS, _TITLES[group], make_lines=_answers).parts(answered)
        files = {
            f"{ways[0]['files']} documents, {ways[0]['tokens']:,} tokens": "{way}",
            "on disk": lambda row: f"{row['bytes'] / 1e6:.1f} MB",
            "per token": lambda row: f"{row['bytes'] / row['tokens'] / 1e3:.1f} kB",
            "of whole": lambda row, whole=ways[0]: f"{row['bytes'] / whole['bytes']:.2f}",
        }
        yield from Listing(files).parts(ways)


def _answers(answered: Sequence[Row]) -> Iterable[Row]:
    """Yield a row for each method: medians of times, counts of right answers, means of the rest.

    "kept" counts the right answers among the "known" ones that reading in full has right.
    """
    right_in_full = [row for row in answered if row["answers"][_FULL.name]["right"]]
    full = [row["answers"][_FULL.name]["seconds"] for row in answered]
    for name in answered[0]["answers"]:
        answers = [row["answers"][name] for row in answered]
        yield {
            "name": name,
            "seconds": median(each["seconds"] for each in answers),
            "share": median(pair_ratios([each["seconds"] for each in answers], full)),
            "right": sum(each["right"] for each in answers),
            "asked": len(answers),
            "kept": sum(row["answers"][name]["right"] for row in right_in_full),
            "known": len(right_in_full),
            "loss": fmean(each["loss"] for each in answers),
            "tokens": fmean(each["kept_tokens"] for each in answers),
        }


LIBRARY = Experiment(
    name="library",
    title="Documents that were read once",
    duration="two hours",
    measure={
        "python": partial(_measure_answers, "python", METHODS),
        "bits": partial(_measure_answers, "bits", IN_BITS),
        "many": rows_by_size,
    },
    part_key="group",
    options={
        "questions": Size(30, 1),
        "documents_added": Size((100, 1000, 10_000), (10, 100)),
    },
    tables=_tables,
)
