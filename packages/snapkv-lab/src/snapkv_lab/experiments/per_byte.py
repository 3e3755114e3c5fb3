"""How many answers are right from the same bytes: in 16 bits or few, by mean or by largest votes.

The texts have about a thousand tokens. They are of the kinds that the pooling was chosen by, but
none of them is a text that it was chosen by. The right answer is fed to the model. A budget is a
share of the bytes that the full cache takes in the model's dtype.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

from snapkv import KVCodes
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.texts import (
    QuestionedText,
    TextMaker,
    count_right,
    make_texts,
    only_answerable,
)
from snapkv_lab.experiments.ways import (
    POLICIES,
    Ours,
    Setting,
    compare_ways,
    group_answers,
    right_cell,
)
from snapkv_lab.report.tables import Pivot
from snapkv_lab.rows import Row

FIRST = 200
TAIL = (
    "Please answer in one short sentence, without any introduction, explanation or repetition of "
    "the question, and do not mention anything else that the text above may say."
)
SHARES = {"1/64": 1 / 64, "1/32": 1 / 32, "1/16": 1 / 16, "1/8": 1 / 8}
CODES: dict[str, Any] = {
    "as it came": None,
    "int8": KVCodes(8, 8),
    "int4": KVCodes(4, 4),
    "keys 8, values 4": KVCodes(8, 4),
}


def _ways(counts: dict[str, int]) -> list[Ours]:
    """Return each named method with one or more ways to store keys and values.

    Args:
        counts: how many storages, the first ones of `CODES`, each method is combined with, by its
            name in `POLICIES`.
    """
    return [
        Ours(name, POLICIES[name], bits, codes)
        for name, count in counts.items()
        for codes, bits in islice(CODES.items(), count)
    ]


SETTINGS = {
    "visible": Setting(
        SHARES, _ways({"paper's": 1, "mean votes": 1, "the last 16 vote": 1, "default": 4})
    ),
    "long-tailed": Setting(SHARES, _ways({"the last 16 vote": 1, "default": 1})),
    "hidden": Setting(
        {"1/4": 1 / 4}, _ways({"the last 16 vote": 1, "default": 4, "AcrossLayers(KVzap)": 4})
    ),
}


def _texts(context: RunContext, setting: str) -> Iterable[QuestionedText]:
    """Return the texts for the given setting.

    They are needles whose questions have a tail for "long-tailed", texts that have a right answer
    for "hidden", and texts of all kinds for "visible".
    """
    if setting == "long-tailed":
        make, indices = TextMaker(context.loaded.tokenizer), range(FIRST, FIRST + context.rounds)
        return (make.needles(context.tokens, index, tail=TAIL) for index in indices)
    texts = make_texts(context, FIRST)
    return only_answerable(texts) if setting == "hidden" else texts


def _sizes(way: Ours, report: Any) -> Row:
    held = {"kept": report.kept_tokens, "bytes": report.held_bytes / report.full_bytes}
    return {"codes": way.codes} | held


def _measure(setting: str, context: RunContext, text: QuestionedText) -> Iterator[Row]:
    return compare_ways({setting: SETTINGS[setting]}, context, text, sizes=_sizes)


_NAMES = {"paper's": "SnapKV", "as it came": "16 bits", "keys 8, values 4": "K8V4"}


def _name(cell: Row) -> str:
    return ", ".join(_NAMES.get(cell[key], cell[key]) for key in ("method", "codes"))


def _percent(cell: Row) -> str:
    return f"{count_right(cell['answers']).share:.0%}"


def _kept(cell: Row) -> str:
    kept, share = (fmean(row[key] for row in cell["answers"]) for key in ("kept", "bytes"))
    return f"{kept:.0f} ({share:.3f})"


_TABLES = (
    (right_cell, "Right answers, and the loss per token above the full cache's", "visible"),
    (_percent, "Percent of the full cache's right answers", "visible"),
    (_kept, "Tokens kept, and the share of bytes held", "visible"),
    (right_cell, "Right answers where the question has a long tail", "long-tailed"),
    (right_cell, "Right answers where the question is hidden", "hidden"),
)

PER_BYTE = Experiment(
    name="per_byte",
    title="Right answers from the same bytes",
    duration="an hour",
    measure={setting: partial(_measure, setting) for setting in SETTINGS},
    cases=_texts,
    part_key="setting",
    options={"tokens": Size(1024, 768), "rounds": Size(8, 1), "dtype": "bfloat16"},
    tables=[
        Listing(
            Pivot("method, bits", _name, "{share}", of), title, {"setting": setting}, group_answers
        )
        for of, title, setting in _TABLES
    ],
)

PER_BYTE_LARGER = replace(
    PER_BYTE,
    name="per_byte_larger",
    title="Right answers from the same bytes, on a larger model",
    duration="half an hour with 1.5 billion parameters; give it --model FOLDER or FILE.gguf",
    options={**PER_BYTE.options, "tokens": Size(768, 768), "rounds": Size(2, 1), "of_model": None},
)
