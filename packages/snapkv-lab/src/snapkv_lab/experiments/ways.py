"""Ways to compress a prompt, and how many answers are still right after each of them.

A way is a policy of snapkv with the bits that keys and values are stored in, or a press of kvpress.
A setting says which ways answer from which share of the full cache.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch

from snapkv import FullCache, default_policy
from snapkv.policies import (
    H2O,
    RKV,
    TOVA,
    AcrossLayers,
    AdaKV,
    CriticalKV,
    ExpectedAttention,
    KeyDiff,
    KVzap,
    KVzip,
    LagKV,
    Policy,
    PyramidKV,
    Random,
    Scissorhands,
    SnapKV,
    StreamingLLM,
)
from snapkv_app.models import LoadedModel
from snapkv_lab.experiments.experiment import RunContext
from snapkv_lab.experiments.kvpress import Kvpress
from snapkv_lab.experiments.texts import (
    PromptCases,
    QuestionedText,
    ReadText,
    TextQuestion,
    count_right,
    list_answers,
    mean_loss_above,
    question_rows,
    score_answer,
)
from snapkv_lab.rows import Row, group_rows

QUANTO_GROUP = 64
"""The quantized cache of transformers stores two extra numbers of the model's dtype for every group
of this many quantized numbers.
"""


class Ours(NamedTuple):
    """A policy from snapkv and the way in which keys and values are stored.

    The policy is made from a budget. `codes` is the name of the storage in rows, if an experiment
    compares several.
    """

    name: str
    policy: Callable[[Any], Policy]
    bits: Any = None
    codes: str = ""


class Theirs(NamedTuple):
    """A press from kvpress, which may be combined with a quantized cache.

    `press` is its name, or None to keep all tokens. `bits` is the number of bits of the cache, or
    None.
    """

    name: str
    press: str | None = None
    bits: int | None = None


Way = Ours | Theirs

_SINGLE = (
    *(ExpectedAttention, H2O, KeyDiff, KVzap, KVzip, LagKV, PyramidKV, Random, SnapKV),
    *(StreamingLLM, TOVA),
)
POLICIES: dict[str, Callable[[Any], Policy]] = {
    **{made.__name__: made for made in _SINGLE},
    "default": default_policy,
    "paper's": SnapKV,
    "mean votes": partial(SnapKV, window_size=16, pooling="fading"),
    "the last 16 vote": partial(default_policy, voters=16),
    # Both evict 16 tokens at a time, so that they hold about their budget at every step. Their
    # authors evict 128 tokens, and half of the cache.
    "R-KV": partial(RKV, evict_every=16),
    "Scissorhands": partial(Scissorhands, drop=16),
    "AdaKV(SnapKV)": lambda budget: AdaKV(SnapKV(budget)),
    "CriticalKV(SnapKV)": lambda budget: CriticalKV(SnapKV(budget)),
    "AdaKV(KVzip)": lambda budget: AdaKV(KVzip(budget)),
    "AcrossLayers(KVzip)": lambda budget: AcrossLayers(KVzip(budget)),
    "AdaKV(KVzap)": lambda budget: AdaKV(KVzap(budget)),
    "AcrossLayers(KVzap)": lambda budget: AcrossLayers(KVzap(budget)),
}
"""The functions that make a policy from a budget, by the method's name in rows."""


def ours(*names: str) -> list[Ours]:
    """Return a list of the named policies, without quantization.

    The names are keys of `POLICIES`.
    """
    return [Ours(name, POLICIES[name]) for name in names]


class Setting(NamedTuple):
    """The ways that answer from each share of the cache, and those that answer from every token.

    The keys of `shares` are the names of the shares in rows.
    """

    shares: Mapping[Any, float]
    ways: Sequence[Way]
    unpruned: Sequence[Way] = ()

    @property
    def compared(self) -> list[tuple[Way, Any, float]]:
        """A list of (way, name of the share, share): all pairs, then the unpruned ways with 1.0."""
        pairs = [(way, *share) for share in self.shares.items() for way in self.ways]
        return [*pairs, *((way, 1.0, 1.0) for way in self.unpruned)]


def percent_of_bytes(share: float, tokens: int) -> str:
    """Return the budget of a policy as a percentage of the full cache's bytes, such as "12.5%".

    Args:
        share: the share of the bytes, from 0 to 1.
        tokens: the length of the prompt, which is not used.
    """
    del tokens
    return f"{100 * share:g}%"


def share_held(way: Ours, report: Any) -> Row:
    """Return a row with "held", the bytes of the compressed cache as a fraction of those of the
    full cache.

    Args:
        way: how the cache was compressed, which is not used.
        report: the report of the cache.
    """
    del way
    return {"held": round(report.held_bytes / report.full_bytes, 4)}


@dataclass(frozen=True)
class Answers:
    """Makes the rows of answers to a prompt. kvpress answers from a process of its own.

    Attributes:
        loaded: the model and its tokenizer.
        theirs: the process of kvpress; None if no way of kvpress takes part.
        budget: makes the budget of a policy from a share and the number of prompt tokens.
        sizes: returns the fields of a row that describe the size of a compressed cache.
    """

    loaded: LoadedModel
    theirs: Kvpress | None = None
    budget: Callable[[float, int], int | str] = percent_of_bytes
    sizes: Callable[[Ours, Any], Row] = share_held

    def of(self, setting: Setting, source: PromptCases) -> Iterator[list[Row]]:
        """Yield the answers of each way in the setting, in the order of `compared`.

        The answers of a way are a list with one row for every case, to which the name of the share
        is added.
        """
        for way, name, share in setting.compared:
            yield [{"share": name} | row for row in self.rows(way, share, source)]

    @torch.inference_mode()
    def rows(self, way: Way, share: float, source: PromptCases) -> list[Row]:
        """Compress the prompt in one way, and return a row for each question.

        Each row has the method, the size of its cache, and the fields of `texts.score_answer`.

        Args:
            way: how the prompt is compressed.
            share: the share of the full cache that stays.
            source: the prompt and its questions.

        Raises:
            InvalidArgumentError: the process of kvpress failed.
        """
        sizes, answers = (
            self._ours(way, share, source)
            if isinstance(way, Ours)
            else self._theirs(way, share, source)
        )
        return [{"method": way.name} | sizes | answer for answer in answers]

    def _ours(self, way: Ours, share: float, source: PromptCases) -> tuple[Row, Iterator[Row]]:
        """Compress a prompt with a policy of snapkv.

        Returns:
            The fields about the size of the cache, and an iterator of a row for each question.
        """
        policy = self.loaded.completed(way.policy(self.budget(share, source.ids.shape[1])))
        prompt = source.read_for(policy, self.loaded)
        cache = prompt.compressed(policy, quantize=way.bits)
        rows = (score_answer(prompt, copy.copy(cache), case) for case in source.cases)
        return self.sizes(way, cache.report()), rows

    def _theirs(self, way: Theirs, share: float, source: PromptCases) -> tuple[Row, Iterator[Row]]:
        """Compress a prompt with kvpress, whose process `theirs` must not be None.

        Args:
            way: the press and the bits. With both, the press keeps more tokens, so that the share
                of bytes is right.
            share: the share of the full cache's bytes that stays.
            source: the prompt and its questions.

        Returns:
            A row with "held", the share of bytes that is held, and an iterator of a row for each
            question.

        Raises:
            InvalidArgumentError: kvpress failed.
        """
        assert self.theirs is not None
        kept = share
        if way.bits and way.press:
            kept /= way.bits / (8 * self.loaded.model.dtype.itemsize) + 2 / QUANTO_GROUP
        how = {"press": way.press, "ratio": 1 - kept, "bits": way.bits}
        held = self.theirs.ask(do="compress", ids=source.ids.tolist(), **how)["held_bytes"]
        full = source.prompt.compressed(FullCache()).report().full_bytes
        return {"held": round(held / full, 4)}, map(partial(_answer, self.theirs), source.cases)


def _answer(theirs: Kvpress, case: TextQuestion) -> Row:
    """Let kvpress feed the right answer, and return the fields of `texts.score_answer`."""
    fed = {"between": list(case.between_ids), "answer": list(case.answer_ids)}
    answer = theirs.ask(do="answer", **fed)
    losses = answer["losses"][1:]
    return {
        "right": [int(all(answer["likeliest"][place] for place in part)) for part in case.parts],
        "nll": round(fmean(losses), 4) if losses else None,
    }


def compare_ways(
    settings: Mapping[str, Setting], context: RunContext, text: QuestionedText, **how: Any
) -> Iterator[Row]:
    """Yield the rows of all questions about a text in the given settings.

    Args:
        settings: what is compared, by the name of the setting.
        context: the run; it names the Python of kvpress if a way of kvpress takes part.
        text: the text with its questions.
        how: `budget` and `sizes` of `Answers`.

    Raises:
        InvalidArgumentError: the environment with kvpress is missing, or kvpress failed.
    """
    loaded, read = context.loaded, ReadText(context.loaded.model, text.ids)
    ways = [way for setting in settings.values() for way, *_ in setting.compared]
    with contextlib.ExitStack() as stack:
        theirs = None
        if any(isinstance(way, Theirs) for way in ways):
            peer = Kvpress(context.python, loaded.model, tokenizer=loaded.tokenizer)
            theirs = stack.enter_context(peer)
        answers = Answers(loaded, theirs, **how)
        for name, setting in settings.items():
            yield from question_rows(read, text, name, partial(answers.of, setting))


def group_answers(rows: list[Row]) -> Iterator[Row]:
    """Group the answers by method, storage, share and setting: one group for a cell of a table.

    Yields:
        "method", "codes" (None if only one storage is compared), "share", "setting", and "answers",
        the list of the group.
    """
    names = ("method", "codes", "share", "setting")
    groups = group_rows(
        list_answers(rows),
        lambda row: (row["method"], row.get("codes"), row["share"], row["of"]["setting"]),
    )
    for key, own in groups.items():
        yield dict(zip(names, key, strict=True)) | {"answers": own}


def right_cell(cell: Row) -> str:
    """Return the text of a table cell: the share of right answers with the number of all answers
    and its interval, and the mean loss above that of the full cache in nats per token.

    Args:
        cell: a row of `group_answers`.
    """
    return f"{count_right(cell['answers'])}, {mean_loss_above(cell['answers']):+.2f}"
