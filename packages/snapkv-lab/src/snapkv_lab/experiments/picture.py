"""The picture at the top of the README: a long text, what heads keep of it, what that saves.

It shows the run of `snapkv demo`: the same text, question and method.
"""

import time
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from snapkv import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.policies import FullCache, default_policy
from snapkv_app.answering import answer_ids, prompt_ids
from snapkv_app.cli.demo import QUESTION, SETTINGS, START, demo_prompt
from snapkv_lab import drawing
from snapkv_lab.experiments.experiment import Experiment, RunContext
from snapkv_lab.experiments.records import RESULTS
from snapkv_lab.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = RESULTS / "picture.svg"
STYLE = drawing.STYLE | {"svg.fonttype": "none"}
_STEPS = 24
"""Number of decode steps that are timed."""

_PARTS = 240
"""Number of equal parts of the text whose kept share is drawn."""


def _measure(context: RunContext) -> Iterator[Row]:
    """Answer the demo's question from a compressed and from the full cache; yield a row for each.

    The compressed cache comes first. A row has the answer, the bytes that the cache holds, the
    processor time of a decode step, and how much of each part of the text the heads keep.
    """
    loaded = context.loaded
    ids = prompt_ids(loaded, demo_prompt(loaded.tokenizer), SETTINGS)
    for policy in (default_policy(), FullCache()):
        cache = CompressedCache(loaded.model, loaded.completed(policy))
        answer, _ = answer_ids(loaded, ids, cache, SETTINGS, answer_start=START)
        kept_shares = _kept_shares(cache, ids.shape[1])
        yield {
            "method": policy.name,
            "question": QUESTION,
            "answer": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "held_bytes": answer.cache.held_bytes,
            "processor_ms_per_token": _processor_ms(loaded.model, ids, cache),
            "kept_shares": kept_shares,
        }


def _processor_ms(model: Any, ids: Tensor, cache: CompressedCache) -> float:
    """Return the processor time of a decode step in milliseconds, the median of several. Other
    programs on the machine hardly change processor time.

    Args:
        model: the model.
        ids: (1, T) int64, whose last token every step reads.
        cache: the cache, to which the steps append tokens.
    """
    times = []
    with torch.inference_mode():
        for _ in range(_STEPS):
            begin = time.process_time()
            model(ids[:, -1:], **passed(cache))
            times.append(1000 * (time.process_time() - begin))
    return median(times)


def _kept_shares(cache: CompressedCache, tokens: int) -> list[float]:
    """Return which share of all heads keeps a token, as the mean over the tokens of each part of
    the text.

    Args:
        cache: the cache that has read the text.
        tokens: the length of the text, which is cut into `_PARTS` equal parts.

    Returns:
        A share from 0 to 1 for each part, in their order.
    """
    counts, heads = torch.zeros(tokens), 0
    for layer in cache.compressed_layers:
        for positions in cache.kept_positions(layer)[0]:
            counts[positions[(positions >= 0) & (positions < tokens)]] += 1
            heads += 1
    return [round(float(part.mean()) / heads, 3) for part in counts.tensor_split(_PARTS)]


def draw_picture(rows: list[Row]) -> "Figure":
    """Draw the text as a strip, the question with its answer, and bars of bytes and time.

    There must be two rows, first that of the compressed cache and then that of the full one.
    """
    from matplotlib import rc_context

    kept, full = rows
    who = "Both caches answer" if kept["answer"] == full["answer"] else "The small cache answers"
    with rc_context(STYLE):
        figure = drawing.new_figure(7.2, 3.0)
        strip, words, held, time = figure.subplot_mosaic(
            [["strip", "strip"], ["words", "words"], ["held", "time"]], height_ratios=[2, 2, 3]
        ).values()
        strip.imshow([kept["kept_shares"]], aspect="auto", cmap="Blues", vmin=0)
        strip.set_title(
            f"A text of {kept['prompt_tokens']:,} tokens. Dark: most heads keep these tokens. "
            "White: no head does.",
            loc="left",
        )
        words.text(0, 0.75, f"Question: {kept['question']}", va="center")
        words.text(0, 0.15, f"{who}: {kept['answer'].strip()}", va="center", weight="bold")
        for panel in (strip, words):
            panel.set_axis_off()
        _draw_bars(held, "keys and values, MiB", [row["held_bytes"] / 2**20 for row in rows])
        _draw_bars(
            time,
            "processor time of a token, ms",
            [row["processor_ms_per_token"] for row in rows],
        )
    return figure


def _draw_bars(panel: Any, title: str, numbers: list[float]) -> None:
    bars = panel.barh(["snapkv", "full cache"], numbers, color=["#2a6fb0", "#9aa5b1"])
    panel.bar_label(bars, fmt="{:.3g}", padding=3)
    panel.invert_yaxis()
    panel.set_title(title, loc="left")
    panel.margins(x=0.15)
    panel.set_xticks([])
    panel.spines[["top", "right", "bottom"]].set_visible(False)


PICTURE = Experiment(
    name="picture",
    title="The picture of the README",
    measure=_measure,
    duration="a minute",
    threads=1,
    draw=lambda rows: drawing.save_figure(draw_picture(rows), FIGURE, STYLE),
)
