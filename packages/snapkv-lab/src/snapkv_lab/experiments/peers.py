"""Right answers against kvpress and transformers' quantized cache, from the same shares of bytes.

The same texts and questions as in `per_byte`, of other numbers: every question once after the
text, where all may look at it, and once hidden, asked of what was kept of the text alone. kvpress's
presses have their own defaults, and run in the environment that `make kvpress` makes. What is held
is counted in both: some presses only mask what they drop.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch

from snapkv import AcrossLayers, AdaKV, CompressedCache, FullCache, KVzap, KVzip, default_policy
from snapkv.kvzip import read_as_wanted
from snapkv_app.models import LoadedModel
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.kvpress import PYTHON, Kvpress
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.texts import (
    AskedPrompt,
    QuestionedText,
    ReadText,
    TextQuestion,
    answers_of,
    loss_above,
    questions,
    right_of,
    scored,
    texts_from,
    with_answers,
)
from snapkv_lab.rows import Row, grouped

FIRST = 400
QUANTO_GROUP = 64
"""Of so many numbers in few bits two more are kept in the model's dtype."""


class Ours(NamedTuple):
    """A policy for what share of the tokens or of the bytes is kept, and in which bits."""

    name: str
    policy: Any
    bits: Any = None


class Theirs(NamedTuple):
    """A press, what share of the tokens it keeps for a share of the bytes, and in how many bits."""

    name: str
    press: str | None = None
    bits: int | None = None


class Setting(NamedTuple):
    """How questions are asked: the shares, and who answers from each or from one of its own."""

    shares: Sequence[float]
    methods: Sequence[Ours | Theirs]
    whole: Sequence[Ours | Theirs]

    @property
    def compared(self) -> list[tuple[Ours | Theirs, float]]:
        """Who answers from which share."""
        asked = [(each, share) for share in self.shares for each in self.methods]
        return [*asked, *((each, 1.0) for each in self.whole)]


_WHOLE = [Theirs("QuantizedCache, 4 bits", bits=4), Theirs("QuantizedCache, 2 bits", bits=2)]
SETTINGS = {
    "visible": Setting(
        [1 / 8, 1 / 4],
        [
            Ours("default", default_policy),
            Theirs("SnapKVPress", "SnapKVPress"),
            Theirs("SnapKVPress in QuantizedCache, 4 bits", "SnapKVPress", 4),
        ],
        _WHOLE,
    ),
    "hidden": Setting(
        [1 / 4, 1 / 2],
        [
            Ours("AdaKV(KVzap)", lambda budget: AdaKV(KVzap(budget))),
            Ours("AdaKV(KVzip)", lambda budget: AdaKV(KVzip(budget))),
            Ours("AcrossLayers(KVzap)", lambda budget: AcrossLayers(KVzap(budget))),
            Ours("AcrossLayers(KVzip)", lambda budget: AcrossLayers(KVzip(budget))),
            *(
                Theirs(name, name)
                for name in ("ExpectedAttentionPress", "CompactorPress", "KeyDiffPress")
            ),
            Theirs("KVzipPress", "KVzipPress"),
        ],
        [Ours("every token, int4", lambda _: FullCache(), "int4"), *_WHOLE],
    ),
}


@dataclass(frozen=True)
class Answers:
    """Of both sides; theirs come from a process of their own."""

    loaded: LoadedModel
    theirs: Kvpress

    def of(self, setting: Setting, asked: AskedPrompt) -> Iterator[list[Row]]:
        return (self.rows(method, share, asked) for method, share in setting.compared)

    def rows(self, method: Ours | Theirs, share: float, asked: AskedPrompt) -> list[Row]:
        """For every case which parts are right, the loss, and the share of the bytes held."""
        made = self._ours if isinstance(method, Ours) else self._theirs
        held, answers = made(method, share, asked)  # type: ignore[arg-type]
        about = {"method": method.name, "share": share, "held": round(held, 4)}
        return [about | answer for answer in answers]

    def _ours(self, method: Ours, share: float, asked: AskedPrompt) -> tuple[float, Iterator[Row]]:
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        policy = self.loaded.completed(method.policy(f"{100 * share:g}%"))
        if policy.needs_reconstruction_pass:
            cache = CompressedCache(model, policy, quantize=method.bits)
            with torch.inference_mode():
                read_as_wanted(model, tokenizer, asked.ids, cache)
        else:
            cache = asked.prompt.compressed(policy, quantize=method.bits)
        report = cache.report()
        rows = (scored(asked.prompt, copy.copy(cache), case) for case in asked.cases)
        return report.held_bytes / report.full_bytes, rows

    def _theirs(
        self, method: Theirs, share: float, asked: AskedPrompt
    ) -> tuple[float, Iterator[Row]]:
        kept = share
        if method.bits and method.press:
            kept /= method.bits / (8 * self.loaded.model.dtype.itemsize) + 2 / QUANTO_GROUP
        how = {"press": method.press, "ratio": 1 - kept, "bits": method.bits}
        held = self.theirs.ask(do="compress", ids=asked.ids.tolist(), **how)["held_bytes"]
        full = asked.prompt.compressed(FullCache()).report().full_bytes
        return held / full, map(self._answer, asked.cases)

    def _answer(self, case: TextQuestion) -> Row:
        fed = {"between": list(case.between_ids), "answer": list(case.answer_ids)}
        said = self.theirs.ask(do="answer", **fed)
        losses = said["losses"][1:]
        return {
            "right": [int(all(said["likeliest"][at] for at in part)) for part in case.parts],
            "nll": round(fmean(losses), 4) if losses else None,
        }


def _measure(given: RunContext, text: QuestionedText) -> Iterator[Row]:
    loaded = given.loaded
    read = ReadText(loaded.model, text.ids)
    with Kvpress(given.python, loaded.model, tokenizer=loaded.tokenizer) as theirs:
        answers = Answers(loaded, theirs)
        for name, setting in SETTINGS.items():
            yield from questions(read, text, name, partial(answers.of, setting))


def _cells(rows: list[Row]) -> Iterator[Row]:
    """Beside the first method with as many bytes: what only one of the two has right."""
    by_method = grouped(answers_of(rows), lambda row: (row["share"], row["method"]))
    setting = SETTINGS[rows[0]["setting"]]
    for method, share in setting.compared:
        if not (own := by_method.get((share, method.name))):
            continue  # not measured yet
        nearest = min(setting.shares, key=lambda each: abs(each - own[0]["held"]))
        others = by_method[nearest, setting.methods[0].name]
        first = {(row["of"]["text"], row["of"]["question"]): row for row in others}
        alone = [_alone(row, first[row["of"]["text"], row["of"]["question"]]) for row in own]
        yield {
            "name": method.name,
            "asked": f"{share:g}" if share < 1 else "all tokens",
            "held": fmean(row["held"] for row in own),
            "right": str(right_of(own)),
            "loss": f"{loss_above(own):+.2f}",
            "only": "{} and {}".format(*map(sum, zip(*alone, strict=True))),
        }


def _alone(own: Row, other: Row) -> tuple[int, int]:
    """Parts that only one of two answers has right, of those that the full cache has right."""
    parts = zip(own["right"], other["right"], own["of"]["full"]["right"], strict=True)
    known = [(mine, theirs) for mine, theirs, full in parts if full]
    return sum(a > b for a, b in known), sum(a < b for a, b in known)


def _tables(rows: list[Row]) -> Iterator[str]:
    columns = {
        "method": "{name}",
        "of the tokens, or bytes": "{asked}",
        "bytes held": "{held:.3f}",
        "right": "{right}",
        "loss": "{loss}",
        "only it, only the first": "{only}",
    }
    asked = [row for row in rows if row.get("answers")]
    for name, own in grouped(asked, "setting").items():
        yield from Listing(columns, f"The question is {name}", made=_cells).parts(own)


PEERS = Experiment(
    name="peers",
    title="Against kvpress and quantized caches",
    takes="an hour",
    measure=_measure,
    cases=lambda given, part: with_answers(texts_from(given, FIRST)),
    options={
        "python": str(PYTHON),
        "tokens": Size(1024, 512),
        "rounds": Size(11, 1),
        "dtype": "bfloat16",
    },
    tables=_tables,
)
