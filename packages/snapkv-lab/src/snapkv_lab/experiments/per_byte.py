"""How many answers are right from the same bytes: 16 bits or few, the window's votes or a draft's.

Texts of about a thousand tokens, of the kinds that the pooling was chosen by but others than those,
the right answer fed. A budget is a share of the bytes of the full cache in the model's dtype.
"""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from snapkv import AdaKV, DraftVotes, KVCodes, SnapKV, default_policy
from snapkv_lab.experiments.auto_budget import loss_above, right_of, texts_from
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import Pivot, Table
from snapkv_lab.experiments.records import Row, grouped
from snapkv_lab.experiments.texts import ReadText, Text, scored, scored_full

SHARES = {"1/16": 1 / 16, "1/8": 1 / 8, "1/4": 1 / 4}
CODES: dict[str, Any] = {
    "as it came": None,
    "int8": KVCodes(8, 8, recent_tokens=16),
    "int4": KVCodes(4, 4, recent_tokens=16),
    "keys 8, values 4": KVCodes(8, 4, recent_tokens=16),
    "keys 4, values 2": KVCodes(4, 2, recent_tokens=16),
    "auto": "auto",
}
METHODS: dict[str, Any] = {
    "paper's": SnapKV,
    "default": default_policy,
    "default, by head": lambda budget: AdaKV(default_policy(budget)),
    "default and draft": lambda budget: DraftVotes(default_policy(budget)),
}
MEASURED = (
    *((method, "as it came") for method in METHODS),
    *((method, "int4") for method in METHODS if "by head" not in method),
    *(("default", codes) for codes in ("int8", "keys 8, values 4", "keys 4, values 2", "auto")),
)


SIZES = ("kept", "bytes")


def _measure(given: Given, text: Text) -> Iterator[Row]:
    read = ReadText(given.loaded.model, text.ids)
    for number, case in enumerate(text.cases):
        prompt = read.asked(case.question_ids)
        full = scored_full(prompt, case)
        asked = {
            "text": text.name,
            "question": number,
            "group": case.group,
            "prompt_tokens": prompt.prompt_tokens,
            "full": full,
        }
        if full["right"] and not any(full["right"]):
            yield asked | {"answers": []}
            continue
        answers = []
        for share in SHARES:
            for method, codes in MEASURED:
                policy = METHODS[method](f"{100 * SHARES[share]:g}%")
                cache = prompt.compressed(policy, quantize=CODES[codes])
                report = cache.report()
                answers.append(
                    {"share": share, "method": method, "codes": codes}
                    | {"kept": report.kept_tokens, "bytes": report.held_bytes / report.full_bytes}
                    | scored(prompt, cache, case)
                )
        yield asked | {"answers": answers}


def _cells(rows: list[Row]) -> Iterator[Row]:
    answers = [
        {**found, "of": row, "name": f"{found['method']}, {found['codes']}"}
        for row in rows
        for found in row.get("answers", ())
    ]
    for (name, share), own in grouped(answers, lambda row: (row["name"], row["share"])).items():
        yield {
            "name": name,
            "share": share,
            "right": f"{right_of(own)}, {loss_above(own):+.2f}",
            "kept": "{:.0f} ({:.3f})".format(*(fmean(row[key] for row in own) for key in SIZES)),
        }


PER_BYTE = Experiment(
    name="per_byte",
    title="Right answers from the same bytes",
    takes="an hour",
    measure=_measure,
    cases=lambda given, part: texts_from(given, 200),
    options={"tokens": Sized(1024, 768), "rounds": Sized(8, 1), "dtype": "bfloat16"},
    tables=[
        Table(
            Pivot("method, what is held", "{name}", "{share}", "{right}"),
            "Right answers, and the loss per token above the full cache's",
            made=_cells,
        ),
        Table(
            Pivot("method, what is held", "{name}", "{share}", "{kept}"),
            "Tokens kept, and the share of bytes held",
            made=_cells,
        ),
    ],
)
