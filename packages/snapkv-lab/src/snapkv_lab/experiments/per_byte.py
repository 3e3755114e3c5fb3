"""How many answers are right from the same bytes: 16 bits or few, the mean or the largest votes.

Texts of about a thousand tokens, of the kinds that the pooling was chosen by but others than those,
the right answer fed. A budget is a share of the bytes of the full cache in the model's dtype.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from snapkv import AcrossLayers, KVCodes, KVzap, SnapKV, default_policy
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.texts import (
    AskedPrompt,
    QuestionedText,
    ReadText,
    TextMaker,
    answers_of,
    questions,
    right_and_loss,
    right_of,
    scored,
    texts_from,
    with_answers,
)
from snapkv_lab.report.tables import Pivot
from snapkv_lab.rows import Row, grouped

FIRST = 200
TAIL = (
    "Please answer in one short sentence, without any introduction, explanation or repetition of "
    "the question, and do not mention anything else that the text above may say."
)
SHARES = {"1/32": 1 / 32, "1/16": 1 / 16, "1/8": 1 / 8, "1/4": 1 / 4}
CODES: dict[str, Any] = {
    "as it came": None,
    "int8": KVCodes(8, 8),
    "int4": KVCodes(4, 4),
    "keys 8, values 4": KVCodes(8, 4),
}
METHODS: dict[str, Any] = {
    "paper's": SnapKV,
    "mean votes": partial(SnapKV, window_size=16, pooling="fading"),
    "default": default_policy,
    "the last 16 vote": partial(default_policy, voters=16),
    "AcrossLayers(KVzap)": lambda budget: AcrossLayers(KVzap(budget)),
}
MEASURED = {
    "visible": {"paper's": 1, "mean votes": 1, "the last 16 vote": 1, "default": 4},
    "long-tailed": {"the last 16 vote": 1, "default": 1},
    "hidden": {"the last 16 vote": 1, "default": 4, "AcrossLayers(KVzap)": 4},
}
"""By setting, which methods answer, in how many of `CODES`."""

NAMES = {"paper's": "SnapKV", "as it came": "16 bits", "keys 8, values 4": "K8V4"}  # in tables

_TABLES = (
    ("{right}", "Right answers, and the loss per token above the full cache's", "visible"),
    ("{percent}", "Percent of the full cache's right answers", "visible"),
    ("{kept}", "Tokens kept, and the share of bytes held", "visible"),
    ("{right}", "Right answers where the question has a long tail", "long-tailed"),
    ("{right}", "Right answers where the question is hidden", "hidden"),
)


def _texts(given: RunContext, setting: str) -> Iterable[QuestionedText]:
    """Of all kinds, but needles alone for questions with a tail."""
    if setting == "long-tailed":
        make, indices = TextMaker(given.loaded.tokenizer), range(FIRST, FIRST + given.rounds)
        return (make.needles(given.tokens, index, tail=TAIL) for index in indices)
    texts = texts_from(given, FIRST)
    return with_answers(texts) if setting == "hidden" else texts


def _measure(setting: str, given: RunContext, text: QuestionedText) -> Iterator[Row]:
    read = ReadText(given.loaded.model, text.ids)
    return questions(read, text, setting, partial(_answers, setting))


def _answers(setting: str, asked: AskedPrompt) -> Iterator[list[Row]]:
    shares = ["1/4"] if setting == "hidden" else ["1/32", "1/16", "1/8"]
    for share, (method, most) in itertools.product(shares, MEASURED[setting].items()):
        for codes in itertools.islice(CODES, most):
            policy = METHODS[method](f"{100 * SHARES[share]:g}%")
            cache = asked.prompt.compressed(policy, quantize=CODES[codes])
            report = cache.report()
            held = {"kept": report.kept_tokens, "bytes": report.held_bytes / report.full_bytes}
            way = {"share": share, "method": method, "codes": codes} | held
            yield [way | scored(asked.prompt, copy.copy(cache), case) for case in asked.cases]


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
    measure={setting: partial(_measure, setting) for setting in MEASURED},
    cases=_texts,
    part_key="setting",
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
