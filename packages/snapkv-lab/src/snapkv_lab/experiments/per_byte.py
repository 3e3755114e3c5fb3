"""How many answers are right from the same bytes: 16 bits or few, the mean or the largest votes.

Texts of about a thousand tokens, of the kinds that the pooling was chosen by but others than those,
the right answer fed. A budget is a share of the bytes of the full cache in the model's dtype.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from snapkv import KVCodes, SnapKV, default_policy
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.texts import (
    AskedPrompt,
    ReadText,
    Text,
    TextMaker,
    answers_of,
    questions,
    right_and_loss,
    right_of,
    scored,
    texts_from,
)
from snapkv_lab.report.tables import Pivot
from snapkv_lab.rows import Row, grouped

FIRST = 200
TAIL = (
    "Please answer in one short sentence, without any introduction, explanation or repetition of "
    "the question, and do not mention anything else that the text above may say."
)
SHARES = {"1/32": 1 / 32, "1/16": 1 / 16, "1/8": 1 / 8}
CODES: dict[str, Any] = {
    "as it came": None,
    "int8": KVCodes(8, 8),
    "int4": KVCodes(4, 4),
    "keys 8, values 4": KVCodes(8, 4),
}
METHODS: dict[str, Any] = {
    "paper's": SnapKV,
    "mean votes": lambda budget: SnapKV(budget, window_size=16, pooling="fading"),
    "default": default_policy,
    "the last 16 vote": partial(default_policy, voters=16),
}
MEASURED = (
    *((method, "as it came") for method in METHODS),
    *(("default", codes) for codes in CODES if codes != "as it came"),
)

NAMES = {"paper's": "SnapKV", "as it came": "16 bits", "keys 8, values 4": "K8V4"}  # in tables

_TABLES = (
    ("{right}", "Right answers, and the loss per token above the full cache's", "visible"),
    ("{percent}", "Percent of the full cache's right answers", "visible"),
    ("{kept}", "Tokens kept, and the share of bytes held", "visible"),
    ("{right}", "Right answers where the question has a long tail", "long-tailed"),
)


def _texts(given: RunContext, part: str) -> Iterator[Text]:
    """Those of all kinds, then needles that are asked for in questions with a tail."""
    make = TextMaker(given.loaded.tokenizer)
    yield from texts_from(given, FIRST)
    indices = range(FIRST, FIRST + given.rounds)
    yield from (make.needles(given.tokens, index, tail=TAIL) for index in indices)


def _measure(given: RunContext, text: Text) -> Iterator[Row]:
    setting = "long-tailed" if text.name.startswith("tails") else "visible"
    return questions(ReadText(given.loaded.model, text.ids), text, setting, _answers)


def _answers(asked: AskedPrompt) -> Iterator[list[Row]]:
    (case,) = asked.cases
    for share in SHARES:
        for method, codes in MEASURED:
            policy = METHODS[method](f"{100 * SHARES[share]:g}%")
            cache = asked.prompt.compressed(policy, quantize=CODES[codes])
            report = cache.report()
            held = {"kept": report.kept_tokens, "bytes": report.held_bytes / report.full_bytes}
            way = {"share": share, "method": method, "codes": codes}
            yield [way | held | scored(asked.prompt, cache, case)]


def _cells(rows: list[Row]) -> Iterator[Row]:
    cells = grouped(answers_of(rows), lambda row: (row["method"], row["codes"], row["share"]))
    for (method, codes, share), own in cells.items():
        yield {
            "name": f"{NAMES.get(method, method)}, {NAMES.get(codes, codes)}",
            "share": share,
            "right": right_and_loss(own),
            "percent": f"{right_of(own).share:.0%}",
            "kept": f"{fmean(row['kept'] for row in own):.0f} "
            f"({fmean(row['bytes'] for row in own):.3f})",
        }


PER_BYTE = Experiment(
    name="per_byte",
    title="Right answers from the same bytes",
    takes="an hour",
    measure=_measure,
    cases=_texts,
    options={"tokens": Size(1024, 768), "rounds": Size(8, 1), "dtype": "bfloat16"},
    tables=[
        Listing(Pivot("method, bits", "{name}", "{share}", of), title, {"setting": setting}, _cells)
        for of, title, setting in _TABLES
    ],
)

PER_BYTE_LARGER = replace(
    PER_BYTE,
    name="per_byte_larger",
    title="Right answers from the same bytes, on a larger model",
    takes="half an hour with 1.5 billion parameters; give it --model FOLDER or FILE.gguf",
    options={**PER_BYTE.options, "tokens": Size(768, 768), "rounds": Size(2, 1), "of_model": None},
)
