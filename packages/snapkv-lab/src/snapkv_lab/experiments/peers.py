"""Right answers against kvpress and transformers' quantized cache, from equal shares of bytes.

The texts and questions are those of `per_byte` with other numbers. Every question is asked once
after the text, where all methods may look at it, and once hidden, of what was kept of the text
alone. kvpress's presses have their own defaults and run in the environment that `make kvpress`
makes. The bytes that are held are counted for both sides: some presses only mask what they drop.
"""

from collections.abc import Iterator
from functools import partial
from statistics import fmean

from snapkv import FullCache
from snapkv_lab.experiments.experiment import Experiment, Size
from snapkv_lab.experiments.kvpress import PYTHON
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.texts import (
    count_right,
    list_answers,
    make_texts,
    mean_loss_above,
    only_answerable,
)
from snapkv_lab.experiments.ways import Ours, Setting, Theirs, compare_ways, ours
from snapkv_lab.rows import Row, group_rows

_QUANTIZED = [Theirs("QuantizedCache, 4 bits", bits=4), Theirs("QuantizedCache, 2 bits", bits=2)]
_HIDDEN_PRESSES = ("ExpectedAttentionPress", "CompactorPress", "KeyDiffPress", "KVzipPress")
SETTINGS = {
    "visible": Setting(
        {1 / 8: 1 / 8, 1 / 4: 1 / 4},
        [
            *ours("default"),
            Theirs("SnapKVPress", "SnapKVPress"),
            Theirs("SnapKVPress in QuantizedCache, 4 bits", "SnapKVPress", 4),
        ],
        _QUANTIZED,
    ),
    "hidden": Setting(
        {1 / 4: 1 / 4, 1 / 2: 1 / 2},
        [
            *ours("AdaKV(KVzap)", "AdaKV(KVzip)", "AcrossLayers(KVzap)", "AcrossLayers(KVzip)"),
            *(Theirs(press, press) for press in _HIDDEN_PRESSES),
        ],
        [Ours("every token, int4", lambda _: FullCache(), "int4"), *_QUANTIZED],
    ),
}


def _cells(rows: list[Row]) -> Iterator[Row]:
    """Yield a row of the table for each measured way, which compares it with the first way.

    The first way is taken at the share that is nearest to the bytes that the way holds. "only"
    counts the parts of answers that just one of the two has right. All rows must be of the same
    setting.
    """
    by_method = group_rows(list_answers(rows), lambda row: (row["share"], row["method"]))
    setting = SETTINGS[rows[0]["setting"]]
    for way, share, _ in setting.compared:
        if not (own := by_method.get((share, way.name))):
            continue  # not measured yet
        nearest = min(setting.shares, key=lambda each: abs(each - own[0]["held"]))
        others = by_method[nearest, setting.ways[0].name]
        first = {(row["of"]["text"], row["of"]["question"]): row for row in others}
        alone = [_alone(row, first[row["of"]["text"], row["of"]["question"]]) for row in own]
        yield {
            "name": way.name,
            "asked": f"{share:g}" if share < 1 else "all tokens",
            "held": fmean(row["held"] for row in own),
            "right": str(count_right(own)),
            "loss": f"{mean_loss_above(own):+.2f}",
            "only": "{} and {}".format(*map(sum, zip(*alone, strict=True))),
        }


def _alone(own: Row, other: Row) -> tuple[int, int]:
    """Count the parts of an answer that only one of two methods has right.

    Parts that the full cache has wrong are left out.

    Returns:
        How many only `own` has right, and how many only `other`.
    """
    parts = zip(own["right"], other["right"], own["of"]["full"]["right"], strict=True)
    known = [(mine, theirs) for mine, theirs, full in parts if full]
    return sum(a > b for a, b in known), sum(a < b for a, b in known)


_COLUMNS = {
    "method": "{name}",
    "of the tokens, or bytes": "{asked}",
    "bytes held": "{held:.3f}",
    "right": "{right}",
    "loss": "{loss}",
    "only it, only the first": "{only}",
}

PEERS = Experiment(
    name="peers",
    title="Against kvpress and quantized caches",
    duration="an hour",
    measure=partial(compare_ways, SETTINGS),
    cases=lambda context, part: only_answerable(make_texts(context, 400)),
    options={
        "python": str(PYTHON),
        "tokens": Size(1024, 512),
        "rounds": Size(11, 1),
        "dtype": "bfloat16",
    },
    tables=[
        Listing(_COLUMNS, f"The question is {name}", {"setting": name}, _cells) for name in SETTINGS
    ],
)
