"""Every method side by side at equal budgets: right answers.

The texts are those of `per_byte` with other numbers. Each question is asked once after its text,
and once it is hidden until the text is compressed. Methods have their own defaults. FastGen has no
budget and takes no part.
"""

from functools import partial

from snapkv_lab.experiments.experiment import Experiment, Size
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.texts import make_texts, only_answerable
from snapkv_lab.experiments.ways import Setting, compare_ways, group_answers, ours, right_cell
from snapkv_lab.report.tables import Pivot

BY_TEXT = ("default", "SnapKV", "ExpectedAttention", "KeyDiff", "LagKV", "Random")
BY_QUESTION = (
    *("PyramidKV", "AdaKV(SnapKV)", "CriticalKV(SnapKV)", "R-KV", "H2O", "TOVA", "Scissorhands"),
    "StreamingLLM",
)
"""Methods that vote, and methods that evict at every step."""

BY_TEXT_ALONE = (
    *("KVzip", "AdaKV(KVzip)", "AcrossLayers(KVzip)"),
    *("KVzap", "AdaKV(KVzap)", "AcrossLayers(KVzap)"),
)
"""Methods that select before any question is known. KVzip reads the text a second time."""

SETTINGS = {
    "visible": Setting({"1/8": 1 / 8, "1/4": 1 / 4}, ours(*BY_TEXT, *BY_QUESTION)),
    "hidden": Setting({"1/4": 1 / 4, "1/2": 1 / 2}, ours(*BY_TEXT, *BY_TEXT_ALONE)),
}

METHODS = Experiment(
    name="methods",
    title="Methods side by side, at equal budgets",
    duration="an hour",
    measure=partial(compare_ways, SETTINGS, budget=lambda share, tokens: round(share * tokens)),
    cases=lambda context, part: only_answerable(make_texts(context, 600)),
    options={"tokens": Size(1024, 512), "rounds": Size(10, 1)},
    tables=[
        Listing(
            Pivot("method", "{method}", "{setting}, {share}", right_cell),
            "Right answers, and the loss per token above the full cache's",
            make_lines=group_answers,
        ),
    ],
)
