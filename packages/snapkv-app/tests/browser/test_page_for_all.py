"""Accessibility of the page: phones, contrast, keyboards and screen readers."""

import itertools

import pytest

from tests.inspector.synthetic import page

pytestmark = pytest.mark.browser

CONTRAST = """
const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const parts = (text) => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
function behind(element) {
  const own = parts(getComputedStyle(element).backgroundColor);
  const isLast = own[3] === 1 || !element.parentElement;
  return isLast ? own.slice(0, 3) : over(own, behind(element.parentElement));
}
const low = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const unseen = element.closest("script, .heard, noscript, option") || !element.checkVisibility();
  if (unseen || !walker.currentNode.data.trim()) continue;
  const back = behind(element);
  const text = light(over(parts(getComputedStyle(element).color), back));
  const [dark, bright] = [text, light(back)].sort((one, other) => one - other);
  const ratio = (bright + 0.05) / (dark + 0.05);
  if (ratio < 4.5) low.push([ratio, element.className, walker.currentNode.data.trim()]);
}
return low;
"""
"""Every text in the page that stands out from what is behind it by less than 4.5 to 1 (WCAG)."""


def made():
    return page(600, labels=("snapkv", "streaming-llm"))


@pytest.mark.parametrize("width", [320, 390])
def test_page_never_scrolls_sideways_on_a_phone(opened, emulated, width):
    emulated(width=width)
    data = made().data()
    data["full"] = "word " * 60 + "x" * 300
    data["question"] = "y" * 200
    seen = opened(data)
    assert seen.run("return innerWidth") == width
    for stop in range(3):
        seen.slide(stop)
        assert seen.run("return document.documentElement.scrollWidth") <= width
    assert "visible" in seen.run("return getComputedStyle(document.body).overflowX")
    for element in seen.all("select, button, input, summary, .text, #marks span"):
        assert element.rect["x"] + element.rect["width"] <= width


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_contrasts_with_its_background(opened, emulated, theme):
    emulated(theme=theme)
    seen = opened(made())
    seen.slide(0)
    seen.run("document.querySelector('details').open = true")
    kinds = seen.run(
        "const tokens = [...document.querySelectorAll('.text span')];"
        "return [...new Set(tokens.map((token) => token.classList[0]))]"
    )
    assert len(kinds) > 3, "several shades are looked at"
    assert seen.run(CONTRAST) == []
    seen.run("document.querySelector('#kept').style.color = 'rgb(128, 128, 128)'")
    assert len(seen.run(CONTRAST)) == (theme == "light"), "the test sees what does not"


def test_focus_is_visible_and_follows_the_page(opened):
    seen = opened(made())
    tops, reached = [], []
    for _ in range(30):
        seen.browser.switch_to.active_element.send_keys("\ue004")
        if seen.run("return document.activeElement === document.body"):
            break
        outline = seen.run(
            "const style = getComputedStyle(document.activeElement);"
            "return [style.outlineStyle, style.outlineWidth]"
        )
        assert outline == ["solid", "3px"], seen.run(
            "return document.activeElement.outerHTML.slice(0, 100)"
        )
        reached.append(seen.run("const e = document.activeElement; return e.id || e.className"))
        tops.append(
            seen.run(
                "let at = 0; for (const e of document.querySelectorAll('*')) "
                "{ if (e === document.activeElement) return at; at += 1; }"
            )
        )
    assert tops == sorted(tops)
    for wanted in ("method", "budget", "said", "find", "text"):
        assert wanted in reached, reached


def test_changes_are_announced_and_every_element_has_a_name(opened):
    seen = opened(made())
    for selector in ("h1", "#status", "#found"):
        assert seen.one(selector).get_attribute("aria-live") == "polite"
    assert seen.one("#budget").accessible_name == "Budget"
    for element in seen.all("select, input, button, .text, [role=region], .said"):
        assert element.accessible_name, element.get_attribute("outerHTML")[:200]
    assert seen.run("return document.documentElement.lang") == "en"
    levels = [int(each.tag_name[1]) for each in seen.all("h1, h2, h3")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
