"""The page for everybody: on a phone, in both themes, by keyboard, and said in words."""

import pytest

from tests.inspector.synthetic import record

pytestmark = pytest.mark.browser

CONTRAST = """
const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const parts = (text) => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
const over = (top, ground) => [0, 1, 2].map((i) => top[i] * top[3] + ground[i] * (1 - top[3]));
function ground(element) {
  const own = parts(getComputedStyle(element).backgroundColor);
  const isLast = own[3] === 1 || !element.parentElement;
  return isLast ? own.slice(0, 3) : over(own, ground(element.parentElement));
}
const low = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const unseen = element.closest("script, .heard, noscript, option") || !element.checkVisibility();
  if (unseen || !walker.currentNode.data.trim()) continue;
  const behind = ground(element);
  const text = light(over(parts(getComputedStyle(element).color), behind));
  const [dark, bright] = [text, light(behind)].sort((one, other) => one - other);
  const ratio = (bright + 0.05) / (dark + 0.05);
  if (ratio < 4.5) low.push([ratio, element.className, walker.currentNode.data.trim()]);
}
return low;
"""
"""Every text in the page whose colour stands out from its ground by less than 4.5 to 1 (WCAG)."""


@pytest.fixture
def emulated(chromium):
    """Pretend to be another screen or theme, until the test ends."""

    def emulate(width=None, theme=None):
        if width:
            size = {"width": width, "height": 740, "deviceScaleFactor": 2, "mobile": True}
            chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        if theme:
            features = [{"name": "prefers-color-scheme", "value": theme}]
            chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    yield emulate
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def two_methods():
    data = record(600, layers=3, heads=2, labels=("snapkv", "streaming-llm"))
    for layer in data["methods"][1]["layers"]:
        layer |= {"votes": None, "scores": None, "cuts": None}
    data["methods"][1]["heat"] = None
    data["full"]["text"] = "word " * 60 + "x" * 300
    return data


@pytest.mark.parametrize("width", [320, 390])
def test_on_a_phone_nothing_scrolls_sideways(opened, emulated, width):
    emulated(width=width)
    page = opened(two_methods())
    assert page.run("return innerWidth") == width
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert "visible" in page.run("return getComputedStyle(document.body).overflowX")
    assert page.one(".text").rect["width"] <= width
    for element in page.all("select, button, input, summary, canvas"):
        assert element.rect["x"] + element.rect["width"] <= width or page.run(
            "return !!arguments[0].closest('.wide')", element
        )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(opened, emulated, theme):
    emulated(theme=theme)
    page = opened(two_methods())
    page.run("document.querySelector('details').open = true")
    kinds = page.run(
        "const tokens = [...document.querySelectorAll('.text span')];"
        "return [...new Set(tokens.map((token) => token.classList[0]))]"
    )
    assert len(kinds) > 3, "several shades are looked at"
    assert page.run(CONTRAST) == []
    page.run("document.querySelector('#lead').style.color = 'rgb(128, 128, 128)'")
    assert len(page.run(CONTRAST)) == (theme == "light"), "the test sees what does not"


def test_the_focus_is_seen_and_follows_the_page(opened):
    page = opened(two_methods())
    tops, seen = [], []
    for _ in range(60):
        page.browser.switch_to.active_element.send_keys("\ue004")
        if page.run("return document.activeElement === document.body"):
            break
        outline = page.run(
            "const style = getComputedStyle(document.activeElement);"
            "return [style.outlineStyle, style.outlineWidth]"
        )
        assert outline == ["solid", "3px"], page.run(
            "return document.activeElement.outerHTML.slice(0, 100)"
        )
        seen.append(page.run("const e = document.activeElement; return e.id || e.className"))
        tops.append(
            page.run(
                "let at = 0; for (const e of document.querySelectorAll('*')) "
                "{ if (e === document.activeElement) return at; at += 1; }"
            )
        )
    assert tops == sorted(tops)
    for wanted in ("skip", "said", "layer", "linear", "text", "top-k", "memory-slider", "spans"):
        assert wanted in seen, seen


def test_what_changes_is_said(opened):
    page = opened(two_methods())
    for selector in (".status", ".votes output", "#memory-answer", "#found"):
        assert page.one(selector).get_attribute("aria-live") == "polite"
    sliders = [one for one in page.all("input[type=range]") if one.is_displayed()]
    assert len(sliders) == 2
    for slider in sliders:
        assert slider.accessible_name
        assert slider.get_attribute("aria-valuetext")
    assert page.one("#linear").aria_role == "switch"


def test_another_answer_is_marked_in_words_and_colours(opened):
    page = opened(two_methods())
    cards = page.all(".card header .badge")
    assert [card.text for card in cards] == ["≠ other answer"] * 2 + ["✓ same answer"]
    card = page.all("#answers .card")[1]
    assert card.find_element("css selector", "del").get_attribute("textContent") == (
        "[only the full cache: nine]"
    )
    assert "snapkv says" in card.find_element("css selector", "ins").text
    assert page.one("#changes-legend").is_displayed()
    data = two_methods()
    for method in data["methods"]:
        method["answer"] |= {"same": True, "changes": [["same", "nine"]]}
    page = opened(data)
    assert [badge.text for badge in page.all("#answers .badge")] == ["✓ same answer"] * 2
    assert not page.one("#changes-legend").is_displayed()
