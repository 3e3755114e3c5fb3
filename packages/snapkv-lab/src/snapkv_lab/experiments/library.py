"""Documents that were read once: how soon the first token comes, and whether answers stay right.

Ten documents of Python's standard library and thirty questions whose answers stand in them, and
questions of SQuAD over paragraphs of one article. Every document is read once for every way of
keeping it, and saved. For every question the files of four documents are loaded and joined; the
same four are read in full beside it, in an order that turns from question to question. The right
answer is then fed to the model: it counts as right where each of its tokens is the likeliest.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from snapkv import AdaKV, CompressedCache, FullCache, KVzip, SnapKV
from snapkv.app.models import LoadedModel
from snapkv.kvzip import read_twice
from snapkv.library import Part, blend
from snapkv.policies import Policy
from snapkv.policies.kvzip import INSTRUCTION
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, table
from snapkv_lab.experiments.library_questions import (
    PREFIX,
    Asked,
    python_questions,
    squad_questions,
)
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.timing import ratios

KEEP_RATIO, BUDGET = 0.3, 512
SQUAD_QUESTIONS = 30
FRACTIONS = (0, 0.05, 0.15, 0.3)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of keeping documents that were read.

    Attributes:
        name: as the page has it.
        policy: what is kept of each.
        quantize: bits of what is kept.
    """

    name: str
    policy: Policy
    quantize: Any = None


WHOLE = Way(name="whole", policy=FullCache())
WAYS = (
    WHOLE,
    Way(name="whole, int8", policy=FullCache(), quantize="int8"),
    Way(name="KVzip 0.3", policy=KVzip(keep_ratio=KEEP_RATIO)),
    Way(name="KVzip 0.3 by head", policy=AdaKV(KVzip(keep_ratio=KEEP_RATIO))),
)


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a question's documents get into a cache.

    Attributes:
        way: how they were kept; None reads them in full.
        recompute: the fraction that is read anew.
        policy: what is kept of them for the question.
    """

    way: Way | None
    recompute: float = 0.0
    policy: Policy = field(default_factory=FullCache)

    @property
    def name(self) -> str:
        """Unique among the methods."""
        if self.way is None:
            return "read in full" if isinstance(self.policy, FullCache) else f"read, {_short(self)}"
        kept = "" if isinstance(self.policy, FullCache) else f", {_short(self)}"
        return f"{self.way.name}, {self.recompute:g}{kept}"


def _short(method: Method) -> str:
    return f"then {method.policy.name} {BUDGET}"


_VOTED = SnapKV(BUDGET, window_size=16)
FEW = (Method(way=None), *(Method(way=WHOLE, recompute=each) for each in FRACTIONS))
METHODS = (
    *FEW,
    *(Method(way=way, recompute=0.15) for way in WAYS[1:]),
    Method(way=WHOLE, recompute=0.15, policy=_VOTED),
)


class Shelf:
    """Documents of one model in a folder, each read once for every way of keeping it.

    Args:
        loaded: model and tokenizer.
        folder: where the files go.
    """

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self.loaded, self.folder = loaded, folder
        self.prefix = self.ids(PREFIX)
        self._files: dict[tuple[str, str], Path] = {}

    def ids(self, text: str) -> Tensor:
        """(1, N) without special tokens."""
        encoded = self.loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        ids: Tensor = encoded.input_ids
        return ids

    def file(self, text: str, way: Way) -> Path:
        """Of a document; it is read where it was not yet."""
        key = (text, way.name)
        if key not in self._files:
            path = self.folder / f"{len(self._files)}"
            ids = torch.cat([self.prefix, self.ids(text)], dim=1)
            self._read(ids, way).save(path, beside={"input_ids": ids})
            self._files[key] = path
        return self._files[key]

    def _read(self, ids: Tensor, way: Way) -> CompressedCache:
        """Behind the prefix, which all heads keep, so that they hold as many tokens each."""
        compresses = not isinstance(way.policy, FullCache)
        protect = [(0, self.prefix.shape[1])] if compresses else None
        cache = CompressedCache(
            self.loaded.model, way.policy, quantize=way.quantize, protect=protect
        )
        if way.policy.reads_twice:
            instruction = self.ids(INSTRUCTION)[0].tolist()
            read_twice(self.loaded.model, ids, cache, instruction_ids=instruction)
        else:
            self.loaded.model(ids, past_key_values=cache, logits_to_keep=1)
        return cache

    def part(self, text: str, way: Way) -> Part:
        """A document out of its file."""
        cache, beside = CompressedCache.load_with(self.file(text, way), self.loaded.model)
        ids = beside["input_ids"]
        return Part(input_ids=ids, cache=cache, prefix_tokens=self.prefix.shape[1])

    def read(self, asked: Asked, method: Method) -> tuple[CompressedCache, Tensor]:
        """A cache that has seen documents and question, and the logits of the next token."""
        model, question = self.loaded.model, self.ids(asked.question)
        if method.way is None:
            cache = CompressedCache(model, method.policy)
            question = torch.cat([self.prefix, *map(self.ids, asked.documents), question], dim=1)
        else:
            parts = [self.part(text, method.way) for text in asked.documents]
            cache = blend(model, parts, method.policy, recompute=method.recompute)
        logits: Tensor = model(question, past_key_values=cache, logits_to_keep=1).logits
        return cache, logits


@torch.inference_mode()
def answered(shelf: Shelf, asked: Asked, method: Method) -> Row:
    """One question, asked by one method."""
    for text in asked.documents:
        if method.way is not None:
            shelf.file(text, method.way)
    answer, started = shelf.ids(asked.answer), time.perf_counter()
    cache, logits = shelf.read(asked, method)
    seconds = time.perf_counter() - started
    if answer.shape[1] > 1:
        behind = shelf.loaded.model(answer[:, :-1], past_key_values=cache).logits
        logits = torch.cat([logits, behind], dim=1)
    chances = logits.log_softmax(dim=-1).gather(2, answer[..., None])
    return {
        "seconds": round(seconds, 4),
        "loss": round(-float(chances.mean()), 4),
        "right": bool((logits.argmax(dim=-1) == answer).all()),
        "kept_tokens": cache.report().kept_tokens,
    }


def measure(
    loaded: LoadedModel, questions: Sequence[Asked], methods: Sequence[Method]
) -> Iterator[Row]:
    """A row for each question, and one for the files of each way of keeping documents."""
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(loaded, Path(folder))
        answered(shelf, questions[0], methods[0])  # warms up
        for number, asked in enumerate(questions):
            turn = number % len(methods)
            order = [*methods[turn:], *methods[:turn]]
            answers = {method.name: answered(shelf, asked, method) for method in order}
            ids = [shelf.prefix, *map(shelf.ids, asked.documents), shelf.ids(asked.question)]
            yield {
                "benchmark": "library",
                "group": asked.group,
                "question": asked.question.splitlines()[-2],
                "documents": len(asked.documents),
                "prompt_tokens": sum(each.shape[1] for each in ids),
                "answers": {method.name: answers[method.name] for method in methods},
            }
        yield from _files(shelf, questions, methods)


def _files(shelf: Shelf, questions: Sequence[Asked], methods: Sequence[Method]) -> Iterator[Row]:
    texts = dict.fromkeys(text for asked in questions for text in asked.documents)
    for way in dict.fromkeys(method.way for method in methods if method.way is not None):
        files = [shelf.file(text, way) for text in texts]
        yield {
            "benchmark": "library",
            "group": questions[0].group,
            "way": way.name,
            "files": len(files),
            "bytes": sum(path.stat().st_size for path in files),
            "tokens": sum(shelf.prefix.shape[1] + shelf.ids(text).shape[1] for text in texts),
        }


def _measured(given: Given) -> Iterator[Row]:
    yield from measure(given.loaded, python_questions(), METHODS)
    yield from measure(given.loaded, squad_questions(SQUAD_QUESTIONS), FEW)


_FULL = "read in full"
_TITLES = {"python": "Documents of Python", "squad": "Paragraphs of SQuAD"}


def _tables(rows: list[Row]) -> Iterator[str]:
    for group in dict.fromkeys(row["group"] for row in rows):
        own = of(rows, group=group)
        ways = [
            row | {"per_token": row["bytes"] / row["tokens"] / 1e3} for row in own if "way" in row
        ]
        whole = ways[0]
        yield f"## {_TITLES[group]}"
        yield table(
            _answers([row for row in own if "answers" in row]),
            {
                "kept, and read again": "{name}",
                "to the first token": "{seconds:.2f} s",
                "of reading in full": "{share:.2f}",
                "right": "{right} of {asked}",
                "of those right in full": "{kept} of {known}",
                "loss": "{loss:.3f}",
                "tokens held": "{tokens:,.0f}",
            },
        )
        yield table(
            ways,
            {
                f"{whole['files']} documents, {whole['tokens']:,} tokens": "{way}",
                "on disk": lambda row: f"{row['bytes'] / 1e6:.1f} MB",
                "per token": "{per_token:.1f} kB",
                "of whole": lambda row, whole=whole: f"{row['bytes'] / whole['bytes']:.2f}",
            },
        )


def _answers(asked: Sequence[Row]) -> Iterator[Row]:
    """For each way of reading what its answers have in common."""
    known = [row for row in asked if row["answers"][_FULL]["right"]]
    for name in asked[0]["answers"]:
        found = [row["answers"][name] for row in asked]
        full = [row["answers"][_FULL]["seconds"] for row in asked]
        yield {
            "name": name,
            "seconds": median(each["seconds"] for each in found),
            "share": median(ratios([each["seconds"] for each in found], full)),
            "right": sum(each["right"] for each in found),
            "asked": len(found),
            "kept": sum(row["answers"][name]["right"] for row in known),
            "known": len(known),
            "loss": fmean(each["loss"] for each in found),
            "tokens": fmean(each["kept_tokens"] for each in found),
        }


EXPERIMENT = Experiment(
    name="library",
    title="Documents that were read once",
    takes="an hour",
    measure=_measured,
    tables=_tables,
    shown={
        "library": Shown(
            "Documents of Python",
            (
                "kept, and read again",
                "to the first token",
                "of reading in full",
                "of those right in full",
                "tokens held",
            ),
            (
                "read in full",
                "whole, 0",
                "whole, 0.15",
                "KVzip 0.3, 0.15",
                "KVzip 0.3 by head, 0.15",
                "whole, 0.15, then snapkv 512",
            ),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
