"""Pictures of the inspector's page on a real document, for the documentation.

    python -m snapkv_lab.experiments screenshots    write docs/inspector-*.png

Needs selenium, Chromium and its driver, as `make test-browser` installs them, and Pillow, which
comes with matplotlib. The document is the first half of the source of Python's gzip module, the
question that of `make demo`.
"""

import gzip
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

DOCS = Path(__file__).parents[5] / "docs"
_ASKED = (
    ("--question", "Which RFC requires the FNAME field to be Latin-1?"),
    ("--answer-start", "The FNAME field is required to be Latin-1 by RFC"),
    ("--budget", "256"),
    ("--max-new-tokens", "8"),
    ("--budgets", "32,64,128,256,512,1k"),
    ("--checks", "32"),
    ("--beside", "streaming-llm"),
    ("--output", "page.html"),
)
_CHARACTERS = 11_000
_WIDTH, _PHONE_WIDTH = 1200, 390
_COLOURS = 128


def take_pictures(page: Path) -> None:
    """The top of the page, the votes, quality against memory, what the answer needs; a phone."""
    browser = _browser()
    try:
        browser.get(page.resolve().as_uri())
        _picture(browser, "inspector-text", "body", _WIDTH, 1300)
        _picture(browser, "inspector-votes", "h4", _WIDTH, 1000)
        _picture(browser, "inspector-memory", "#memory-title", _WIDTH, 560)
        _picture(browser, "inspector-needs", "#spans-title", _WIDTH, 640)
        _picture(browser, "inspector-phone", "body", _PHONE_WIDTH, 844)
    finally:
        browser.quit()


def _browser() -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def _picture(browser: Any, name: str, selector: str, width: int, height: int) -> None:
    """What is in view when an element stands at the top, in few colours."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < _WIDTH}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_async_script("setTimeout(arguments[0], 1000)")  # the page redraws
    script = (
        "document.getElementById('controls').style.position = 'static';"
        "document.querySelector(arguments[0]).scrollIntoView()"
    )
    browser.execute_script(script, selector)
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
    picture.quantize(_COLOURS).save(DOCS / f"{name}.png", optimize=True)


def main() -> None:
    """Inspect, open, take the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(gzip.__file__).read_text(encoding="utf-8")
        Path(folder, "gzip.py").write_text(source[:_CHARACTERS], encoding="utf-8")
        arguments = [text for pair in _ASKED for text in pair]
        # -P: the gzip.py of the folder must not be imported instead of Python's.
        command = [sys.executable, "-P", "-m", "snapkv", "inspect", "gzip.py", *arguments]
        subprocess.run(command, cwd=folder, check=True)
        take_pictures(Path(folder) / "page.html")


if __name__ == "__main__":
    main()
