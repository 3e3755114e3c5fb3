"""Parts of the documentation that are made by programs, besides the results.

`plans` writes the table of docs/planning.md: the paper's models, planned from their shapes.
`overview` draws the picture of docs/index.md from the rows of `speed`. `screenshots` makes
docs/inspector-*.png; it needs selenium, Chromium and its driver, which `make test-browser`
installs, and Pillow, which comes with matplotlib.
"""

import gzip
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapkv.validation import format_bytes
from snapkv_app.cli.demo import QUESTION, START
from snapkv_app.plan import Request, plan
from snapkv_app.plan.shapes import SHAPES
from snapkv_lab import drawing
from snapkv_lab.experiments.experiment import Experiment
from snapkv_lab.experiments.records import RESULTS, ROOT
from snapkv_lab.experiments.speed import SPEED
from snapkv_lab.report.tables import markdown_table
from snapkv_lab.rows import Row, select_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLANNING = ROOT / "docs/planning.md"
BEGIN, END = "<!-- planned: python -m snapkv_lab.experiments plans -->\n", "<!-- /planned -->\n"
_MODELS = ("lwm-7b", "longchat-7b", "mistral-7b", "mixtral-8x7b", "command-r-35b")


def fill_planning_table(page: str) -> str:
    """Return the text of docs/planning.md with an updated table between `BEGIN` and `END`. The
    table has the bytes and the speed-ups of the paper's models.

    Args:
        page: the text of the page, which must have both marks.
    """
    header = ["model", "weights", "full cache", "compressed", "decoding, at most", "batch of 8"]
    lines = []
    for name in _MODELS:
        footprint = SHAPES[name].footprint()
        requests = (Request(context_tokens=128_000, batch=batch) for batch in (1, 8))
        alone, many = (plan(name, footprint, each) for each in requests)
        sizes = footprint.weights_bytes, alone.full.cache_bytes, alone.compressed.cache_bytes
        faster = (f"{each.decode_speedup:.1f}x" for each in (alone, many))
        lines.append([name, *map(format_bytes, sizes), *faster])
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{markdown_table(header, lines)}\n\n{END}{rest.partition(END)[2]}"


PLANS = Experiment(
    name="plans",
    title="The table of docs/planning.md",
    draw=lambda known: PLANNING.write_text(
        fill_planning_table(PLANNING.read_text("utf-8")), "utf-8"
    ),
)

FIGURE = RESULTS / "overview.svg"
STYLE = drawing.STYLE | {"svg.fonttype": "none"}
_COLOURS = {"full": "#9aa5b1", "snapkv": "#2a6fb0"}
_BAR = 0.38


def draw_overview(rows: list[Row]) -> "Figure":
    """Draw bars that compare bytes and time per token of the full cache and SnapKV.

    There are bars after a short and after a long prompt.

    Args:
        rows: the rows of the experiment `speed`.
    """
    from matplotlib import rc_context

    timed = [row for row in select_rows(rows, benchmark="decode") if "ms_per_token" in row]
    budget = timed[0]["budget"]
    labels = {"full": "full cache", "snapkv": f"SnapKV, budget {budget}"}
    with rc_context(STYLE):
        figure = drawing.new_figure(7.2, 2.6)
        held, time = figure.subplots(1, 2)
        for place, (cache, label) in enumerate(labels.items()):
            own = sorted(select_rows(timed, cache=cache), key=lambda row: int(row["prompt_tokens"]))
            places = [index + (place - 0.5) * _BAR for index in range(len(own))]
            names = [f"{row['prompt_tokens']:,} prompt tokens" for row in own]
            for panel, heights in (
                (held, [row["held_bytes"] / 2**20 for row in own]),
                (time, [row["ms_per_token"]["p50"] for row in own]),
            ):
                bars = panel.bar(places, heights, _BAR, label=label, color=_COLOURS[cache])
                panel.bar_label(bars, fmt="{:.3g}", padding=2)
                panel.set_xticks(range(len(own)), names)
        for panel, title in ((held, "keys and values, MiB"), (time, "ms per generated token")):
            panel.set_title(title)
            panel.margins(y=0.15)
            panel.spines[["top", "right"]].set_visible(False)
        handles, names = held.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False)
    return figure


OVERVIEW = Experiment(
    name="overview",
    title="The picture of docs/index.md",
    load=SPEED.results,
    draw=lambda rows: drawing.save_figure(draw_overview(rows), FIGURE, STYLE),
)

_WIDE, _COLOURS_KEPT = 1200, 128
_PICTURES = (  # name, width, height
    ("inspector-page", _WIDE, 860),
    ("inspector-phone", 390, 844),
)
_INSPECT = (
    *("--question", QUESTION),
    *("--answer-start", START),
    *("--budget", "128", "--budgets", "20,32,64,256,512", "--max-new-tokens", "8"),
    *("--output", "page.html"),
)


def _screenshots(known: object) -> None:
    """Inspect the first half of the source of Python's gzip module, and take pictures of it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(gzip.__file__).read_text(encoding="utf-8")[:11_000]
        Path(folder, "gzip.py").write_text(source, encoding="utf-8")
        # -P: the gzip.py of the folder must not be imported instead of Python's.
        command = [sys.executable, "-P", "-m", "snapkv_app", "inspect", "gzip.py", *_INSPECT]
        subprocess.run(command, cwd=folder, check=True)
        browser = _browser()
        try:
            browser.get(Path(folder, "page.html").resolve().as_uri())
            for picture in _PICTURES:
                _take(browser, *picture)
        finally:
            browser.quit()


def _browser() -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def _take(browser: Any, name: str, width: int, height: int) -> None:
    """Save the top of the page in the browser as a picture with few colours, into `docs/NAME.png`,
    on a screen of the given size in pixels.
    """
    from PIL import Image

    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < _WIDE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_async_script("setTimeout(arguments[0], 1000)")  # the page redraws
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
    picture.quantize(_COLOURS_KEPT).save(ROOT / "docs" / f"{name}.png", optimize=True)


SCREENSHOTS = Experiment(
    name="screenshots", title="Pictures of the inspector's page", draw=_screenshots
)
