"""A headless Chromium of the system, driven by selenium: `make test-browser` installs both."""

import shutil

import pytest

from snapkv.page import filled_page

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1400,1200",
)


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    driver = shutil.which("chromedriver")
    assert driver, "chromedriver is missing: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


class Page:
    """A page in the browser, and what a user can see and do."""

    def __init__(self, browser):
        self.browser = browser

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        return self.browser.find_element("css selector", selector)

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def slide(self, stop):
        """Move the slider; returns the milliseconds until the page has redrawn."""
        return self.browser.execute_async_script(
            """
            const [stop, done] = arguments;
            const slider = document.getElementById("budget");
            const began = performance.now();
            slider.value = String(stop);
            slider.dispatchEvent(new Event("input", { bubbles: true }));
            requestAnimationFrame(() => setTimeout(() => done(performance.now() - began), 0));
            """,
            stop,
        )

    def token(self, number):
        """The element of a token in view."""
        return self.one(f".text [data-token='{number}']")

    def slowness(self):
        """How many times slower than an idle machine this one runs now; at least 1."""
        took = self.run(
            """
            const began = performance.now();
            let sum = 0;
            for (let i = 0; i < 3e7; i += 1) sum = (sum * 31 + i) % 1000003;
            return sum < 0 ? 0 : performance.now() - began;
            """
        )
        return max(1, took / 150)

    def errors(self):
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def opened(chromium, tmp_path):
    """Open a page; every test ends without a word on the console."""

    def open_page(page):
        """A `snapkv.page.Page`, or data that a test has changed."""
        path = tmp_path / "page.html"
        html = filled_page(page) if isinstance(page, dict) else page.html
        path.write_text(html, encoding="utf-8")
        chromium.get_log("browser")
        chromium.get(path.as_uri())
        page = Page(chromium)
        assert page.run("return document.documentElement.dataset.ready") is not None, page.errors()
        return page

    yield open_page
    assert Page(chromium).errors() == []


@pytest.fixture
def emulated(chromium):
    """Pretend to be another screen or theme, until the test ends."""

    def emulate(width=None, height=740, theme=None):
        if width:
            size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": width < 600}
            chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        if theme:
            features = [{"name": "prefers-color-scheme", "value": theme}]
            chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    yield emulate
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
