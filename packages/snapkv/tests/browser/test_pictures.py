"""The two pictures that move: the vote with its top-k, and quality against memory."""

import base64

import pytest

from tests.inspector.synthetic import record

pytestmark = pytest.mark.browser

RIGHT, LEFT = "\ue014", "\ue012"


def order_of(data):
    raw = base64.b64decode(data["methods"][0]["heat"]["order"])
    return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]


def needed_of(data):
    return {
        t for span in data["spans"] if span["changed"] for t in range(span["start"], span["stop"])
    }


def slide(page, selector, value):
    page.run(
        "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('input'))",
        selector,
        str(value),
    )


def test_the_page_opens_with_a_sentence_and_the_most_telling_head(opened):
    page = opened(record(400, layers=3, heads=2))
    assert page.one("#lead").text == "The answer needs § 9.11; snapkv kept all of it."
    assert page.one(".votes h4").text == "Votes of layer 2, head 1"
    assert "votes most for what the answer needs: 34% of its votes" in page.one(".votes p").text
    assert page.one("canvas.heat").is_displayed()
    page.pick("#layer", "layer 0")
    page.pick("#head", "head 1")
    assert page.one(".votes h4").text == "Votes of layer 0, head 1"
    assert not page.one("canvas.heat").is_displayed()
    assert not page.one(".top-k").is_displayed()
    assert "Layer 2, head 1 votes most for" in page.one(".votes p").text


def test_the_slider_keeps_the_best_of_the_vote(opened):
    data = record(400)
    page, order, needed = opened(data), order_of(data), needed_of(data)
    slider, result = page.one(".top-k"), page.one(".votes output")
    best = data["methods"][0]["heat"]["best_tokens"]
    assert slider.get_attribute("value") == str(best)
    assert result.text.startswith(f"Top {best} tokens (the kept ones): ")
    all_from = max(rank for rank, token in enumerate(order) if token in needed) + 1
    for count in (0, 1, 17, all_from - 1, all_from, len(order)):
        slide(page, ".top-k", count)
        share = len(needed & set(order[:count])) / len(needed)
        said = result.text
        assert said.startswith(f"Top {count} tokens")
        assert f"; all of it from top {all_from} on" in said
        shown = float(said.split(": ")[1].split("%")[0])
        assert shown == pytest.approx(100 * share, abs=0.51)
    assert slider.get_attribute("aria-valuetext") == result.text


def test_the_slider_moves_the_cut_and_what_is_kept_and_comes_back(opened):
    page = opened(record(400))
    before = page.painted("canvas.overview"), page.painted("canvas.detail")
    best = page.one(".top-k").get_attribute("value")
    page.one(".top-k").send_keys(RIGHT)
    assert page.one(".top-k").get_attribute("value") == str(int(best) + 1)
    slide(page, ".top-k", 3)
    after = page.painted("canvas.overview"), page.painted("canvas.detail")
    assert all(one != other for one, other in zip(before, after, strict=True))
    slide(page, ".top-k", best)
    assert (page.painted("canvas.overview"), page.painted("canvas.detail")) == before


def test_the_switch_undoes_the_powers_of_ten(opened):
    page = opened(record(400))
    names = ("canvas.overview", "canvas.detail", "canvas.heat")
    before = [page.painted(name) for name in names]
    page.one("#linear").click()
    assert all(page.painted(name) != old for name, old in zip(names, before, strict=True))
    shares = page.run(
        """
        const view = Object.assign(Object.create(VotesView.prototype), { linear: true });
        const linear = view.shares({ logarithmic: true });
        const even = view.shares({ logarithmic: false });
        return [linear(255), linear(170), linear(0), even(51)];
        """
    )
    assert shares == pytest.approx([1, 0.01, 0, 0.2])
    page.one("#linear").click()
    assert [page.painted(name) for name in names] == before


def test_a_record_without_a_telling_head_has_bars_and_no_slider(opened):
    data = record(200)
    data["methods"][0]["heat"] = None
    page = opened(data)
    assert page.one(".votes h4").text == "Votes of layer 0, head 0"
    assert page.one("canvas.overview").is_displayed()
    assert not page.one(".top-k").is_displayed()
    assert not page.one("canvas.heat").is_displayed()


def test_a_method_that_keeps_the_same_everywhere_has_one_row(opened):
    data = record(200, layers=4)
    layers = data["methods"][0]["layers"]
    one = base64.b64decode(layers[0]["bits"])[:25]
    for layer in layers:
        layer["bits"] = base64.b64encode(one * 3).decode()
    page = opened(data)
    rows = page.all(".layers tbody tr")
    assert len(rows) == 1
    assert rows[0].text.startswith("all ")
    assert page.one(".layers caption").text == "Every head of every layer keeps the same tokens"
    layers[3]["kept_tokens"] = [1, 2, 3]
    page = opened(data)
    names = [row.text for row in page.all(".layers tbody th")]
    assert names == ["0 to 2", "3"]


def test_memory_is_moved_along_the_budgets(opened):
    page = opened(record(200))
    slider, answer = page.one("#memory-slider"), page.one("#memory-answer")
    assert slider.get_attribute("value") == "1"  # the smallest budget with the full cache's answer
    assert "128 tokens per head: 4.0 MiB of 1.0 GiB held (0.4%)" in answer.text
    assert "probability of the full cache's answer 80%" in answer.text
    assert "✓ same answer" in answer.text
    before = page.painted("#memory-curve")
    slider.send_keys(LEFT)
    assert "64 tokens per head" in answer.text
    assert "≠ other answer" in answer.text
    assert "another answer" in slider.get_attribute("aria-valuetext")
    assert page.painted("#memory-curve") != before
    slider.send_keys(RIGHT, RIGHT)
    assert "probability of the full cache's answer not known" in answer.text
    label = page.one("#memory-curve").get_attribute("aria-label")
    assert label.endswith("128 tokens are the smallest budget that gives the full cache's answer")
    page.one("summary").click()
    assert len(page.all("#memory-table tbody tr")) == 3


def test_without_budgets_there_is_no_curve(opened):
    data = record(200)
    data["curve"] = []
    page = opened(data)
    assert not page.one("#memory").is_displayed()
