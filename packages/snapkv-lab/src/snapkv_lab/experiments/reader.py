"""Questions that nobody knew when a text was read, and a quarter of the bytes to answer them from.

A text is what two modules of Python's standard library say of themselves. The questions were
written by hand; their answers stand word for word in the text. Those count that the full cache
answers right when the modules stand in the other order, so what is judged has chosen nothing. The
text is read and compressed, then every question is read behind it and the right answer fed: right
where each of its tokens is the likeliest. Bytes are counted against the model's own 16 bits.
"""

import copy
import functools
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from snapkv import (
    AdaKV,
    Compactor,
    CompressedCache,
    ExpectedAttention,
    FullCache,
    KeyDiff,
    KVCodes,
    KVzap,
    KVzip,
)
from snapkv.app.observing import Recorder, record_prompt, record_prompt_twice
from snapkv.kvzip import instruction_of
from snapkv_lab.experiments import library
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.library import (
    PREFIX,
    Asked,
    Method,
    Shelf,
    Way,
    asked_of,
    module_text,
)
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.records import Row, grouped, last_run, read_rows

QUESTIONS = (library.QUESTIONS, Path(__file__).with_name("reader_questions.jsonl"))
SEED = 5
QUARTER = "25%"
BITS: dict[str, Any] = {"16 bits": None, "int8": "int8", "K8V4": "K8V4", "int4": "int4"}
FEWER: dict[str, Any] = {"int4, groups of 64": KVCodes(group_size=64), "K4V2": "K4V2"}

_ONE_READING = {
    "KVzap": KVzap(QUARTER),
    "AdaKV(KVzap)": AdaKV(KVzap(QUARTER)),
    "Compactor": Compactor(QUARTER),
    "ExpectedAttention": ExpectedAttention(QUARTER),
    "KeyDiff": KeyDiff(QUARTER),
}
_TWO_READINGS = {"KVzip": KVzip(QUARTER), "AdaKV(KVzip)": AdaKV(KVzip(QUARTER))}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two documents in the order that is judged, and the questions about them."""

    name: str
    asked: Sequence[Asked]

    @property
    def documents(self) -> Sequence[str]:
        return self.asked[0].documents


def pairs(count: int) -> Iterator[Pair]:
    """So many of the pairs that the modules are drawn to, each with all of its questions."""
    own = grouped([row for file in QUESTIONS for row in read_rows(file)], "document")
    names = random.Random(SEED).sample(sorted(own), len(own))
    for first, second in list(zip(names[::2], names[1::2], strict=True))[:count]:
        documents = [module_text(first), module_text(second)]
        asked = [asked_of(row["document"], documents, row) for row in own[first] + own[second]]
        yield Pair(name=f"{first}, {second}", asked=asked)


@torch.inference_mode()
def answered(given: Given, cache: CompressedCache, asked: Asked) -> Row:
    """How likely the right answer is behind a text and a question, which stay as they were."""
    tokenizer, model, branch = given.loaded.tokenizer, given.loaded.model, copy.copy(cache)
    question, answer = (library.encoded(tokenizer, each) for each in (asked.question, asked.answer))
    ids = torch.cat([question, answer[:, :-1]], dim=1)
    kept = answer.shape[1]
    logits = model(ids, past_key_values=branch, logits_to_keep=kept).logits.float()
    chances = logits.log_softmax(dim=-1).gather(2, answer[..., None])
    return {
        "right": bool((logits.argmax(dim=-1) == answer).all()),
        "loss": round(-float(chances.mean()), 4),
    }


def _known(given: Given, pair: Pair) -> list[Asked]:
    """The questions that the full cache answers right where the documents stand the other way."""
    cache = CompressedCache(given.loaded.model, FullCache())
    _read(given, cache, _ids(given, pair.documents[::-1]))
    return [asked for asked in pair.asked if answered(given, cache, asked)["right"]]


@torch.inference_mode()
def _read(given: Given, cache: CompressedCache, ids: Tensor) -> None:
    given.loaded.model(ids, past_key_values=cache, logits_to_keep=1)


def _ids(given: Given, documents: Sequence[str]) -> Tensor:
    return library.encoded(given.loaded.tokenizer, PREFIX, *documents)


def _compressed(bits: dict[str, Any], given: Given, pair: Pair) -> Iterator[Row]:
    """Text and questions as one prompt would have them, the text compressed before."""
    known = _known(given, pair)
    yield from _rows(given, pair, known, _caches(given, _ids(given, pair.documents), bits))


def _caches(
    given: Given, ids: Tensor, codes: dict[str, Any]
) -> Iterator[tuple[str, CompressedCache, float]]:
    """Of every way its name, a cache that has read the text, and its share of the full bytes."""
    model = given.loaded.model
    once = record_prompt(model, ids, Recorder.for_policies(_ONE_READING.values()))
    asks = instruction_of(given.loaded.tokenizer)
    twice = record_prompt_twice(model, ids, _TWO_READINGS["KVzip"], instruction_ids=asks)
    for name, bits in codes.items():
        whole = {"whole": FullCache()} | _ONE_READING
        for prompt, policies in ((once, whole), (twice, _TWO_READINGS)):
            for method, policy in policies.items():
                cache = prompt.compressed(policy, quantize=bits)
                report = cache.report()
                yield f"{method}, {name}", cache, report.held_bytes / report.full_bytes


def _rows(
    given: Given,
    pair: Pair,
    known: Sequence[Asked],
    caches: Iterator[tuple[str, CompressedCache, float]],
) -> Iterator[Row]:
    """A row for each question; the answers of every way to those that are known."""
    answers: list[dict[str, Row]] = [{} for _ in known]
    for name, cache, share in caches if known else ():
        held = {"kept": round(cache.report().kept_tokens, 1), "bytes": round(share, 5)}
        for found, asked in zip(answers, known, strict=True):
            found[name] = answered(given, cache, asked) | held
    by_question = dict(zip((asked.question for asked in known), answers, strict=True))
    tokens = _ids(given, pair.documents).shape[1]
    for asked in pair.asked:
        row = {"text": pair.name, "question": asked.question.splitlines()[-2], "tokens": tokens}
        yield row | {"module": asked.group, "answers": by_question.get(asked.question)}


_LIBRARY = [
    Method(f"{bits}, {again:g}", Way(bits, FullCache(), code), again)
    for bits, code in BITS.items()
    for again in (0, 0.2)
]


def _library(given: Given, pair: Pair) -> Iterator[Row]:
    """The documents read apart and stored in few bits, joined when a question comes."""
    known = _known(given, pair)
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(given.loaded, Path(folder))
        yield from _rows(given, pair, known, _joined(shelf, pair.asked[0]))


@torch.inference_mode()
def _joined(shelf: Shelf, asked: Asked) -> Iterator[tuple[str, CompressedCache, float]]:
    """As `_caches`; the bytes are those of the files."""
    whole = shelf.bytes(asked, _LIBRARY[0])
    for method in _LIBRARY:
        share = shelf.bytes(asked, method) / whole
        yield method.name, shelf.documents(asked, method), share


def _tables(rows: list[Row]) -> Iterator[str]:
    asked = grouped([row for row in rows if "text" in row], "part")
    full = {row["question"]: row["answers"] for row in asked["compressed"] if row["answers"]}
    for part, own in asked.items():
        known = [row | {"full": full[row["question"]][FULL]} for row in own if row["answers"]]
        title = f"{_TITLES[part]}, {len(known)} of {len(own)} questions"
        yield from Table(_COLUMNS, title, made=_lines).parts(known)
        if part == "compressed":
            apart = [row for row in known if not FITTED & set(row["text"].split(", "))]
            title = f"Without modules that the gate may have read, {len(apart)} questions"
            yield from Table(_COLUMNS, title, made=_lines).parts(apart)


FITTED = {
    *("argparse", "http.client", "plistlib", "site", "socket", "socketserver", "subprocess"),
    *("turtle", "uuid"),
}
"""Modules among those whose source the demo model's gate was fitted from parts of."""

FULL = "whole, 16 bits"
_TITLES = {
    "compressed": "The text first",
    "fewer": "The text first, fewer bits",
    "library": "A library's documents",
}
_COLUMNS: dict[str, Any] = {
    "kept": "{name}",
    "bytes": "{bytes:.1%}",
    "tokens": "{tokens:.0%}",
    "right": "{right} of {asked}",
    "lost": "{lost} of {known}",
    "loss": "{loss:+.3f}",
}


def _lines(known: Sequence[Row]) -> Iterator[Row]:
    """Of every way: right answers, those lost that the full cache has right, loss above its own."""
    of_full = [row["full"] for row in known]
    for name in known[0]["answers"]:
        found = [row["answers"][name] for row in known]
        both = list(zip(found, of_full, strict=True))
        yield {
            "name": name,
            "bytes": fmean(each["bytes"] for each in found),
            "tokens": fmean(row["answers"][name]["kept"] / row["tokens"] for row in known),
            "right": sum(each["right"] for each in found),
            "asked": len(found),
            "lost": sum(own["right"] and not each["right"] for each, own in both),
            "known": sum(own["right"] for own in of_full),
            "loss": fmean(each["loss"] - own["loss"] for each, own in both),
        }


READER = Experiment(
    name="reader",
    title="Questions that nobody knew when the text was read",
    takes="an hour",
    measure={
        "compressed": functools.partial(_compressed, BITS),
        "fewer": functools.partial(_compressed, FEWER),
        "library": _library,
    },
    cases=lambda given, part: pairs(given.pairs),
    options={"pairs": Sized(15, 1), "dtype": "bfloat16"},
    measured=last_run,
    tables=_tables,
)
