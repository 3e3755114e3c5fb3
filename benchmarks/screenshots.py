"""Pictures of the inspector's page on a real document, for the documentation.

    python -m benchmarks.screenshots    write docs/inspector-*.png

Needs selenium, Chromium and its driver, as `make test-browser` installs them. The document is the
source of Python's gzip module, the question that of `make demo`.
"""

import gzip
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
_ASKED = (
    ("--question", "Which RFC requires the FNAME field to be Latin-1?"),
    ("--answer-start", "The FNAME field is required to be Latin-1 by RFC"),
    ("--budget", "512"),
    ("--max-new-tokens", "8"),
    ("--beside", "streaming-llm"),
    ("--output", "page.html"),
)
_WIDTH = 1200
_PICK_THE_BEST_HEAD = """
const data = JSON.parse(document.getElementById("data").textContent);
const span = data.spans.reduce((one, other) => (other.loss > one.loss ? other : one));
const kept = new Kept(data.methods[0], data.pieces.length);
let best = { sum: -1 };
data.methods[0].layers.forEach((layer, place) => layer.kept_tokens.forEach((_, head) => {
  const counts = kept.chosen(place, head).counts.subarray(span.start, span.stop);
  const sum = counts.reduce((one, other) => one + other, 0);
  if (sum > best.sum) best = { sum, layer: layer.layer, head };
}));
for (const id of ["layer", "head"]) {
  const picker = document.getElementById(id);
  picker.value = best[id];
  picker.dispatchEvent(new Event("change"));
}
"""
"""The head that keeps most of what the answer needs."""


def take_pictures(page: Path) -> None:
    """A picture of the answers and the text, one of the votes, one of what the answer needs."""
    browser = _browser()
    try:
        browser.get(page.resolve().as_uri())
        _picture(browser, "inspector-text", "h1", 1300)
        browser.execute_script(_PICK_THE_BEST_HEAD)
        _picture(browser, "inspector-votes", "h4", 950)
        _picture(browser, "inspector-needs", "#spans-title", 800)
    finally:
        browser.quit()


def _browser() -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def _picture(browser: Any, name: str, selector: str, height: int) -> None:
    """What is in view when an element stands at the top."""
    browser.set_window_size(_WIDTH, height)
    browser.execute_async_script("setTimeout(arguments[0], 500)")  # the page redraws after a resize
    script = (
        "document.getElementById('controls').style.position = 'static';"
        "document.querySelector(arguments[0]).scrollIntoView()"
    )
    browser.execute_script(script, selector)
    browser.save_screenshot(str(DOCS / f"{name}.png"))


def main() -> None:
    """Inspect, open, take the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(gzip.__file__, folder)
        arguments = [text for pair in _ASKED for text in pair]
        command = [sys.executable, "-m", "snapkv", "inspect", "gzip.py", *arguments]
        subprocess.run(command, cwd=folder, check=True)
        take_pictures(Path(folder) / "page.html")


if __name__ == "__main__":
    main()
