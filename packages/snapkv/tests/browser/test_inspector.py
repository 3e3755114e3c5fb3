"""The inspector's page in a real browser: what is shown, pressed, and how fast."""

import itertools

import pytest

from tests.inspector.synthetic import record

pytestmark = pytest.mark.browser

NASTY = (
    "</script><script>window.ran = true</script>",
    "<img src=x onerror='window.ran = true'>",
    "<b>bold</b>",
    "{{data}}",
    "&lt;",
    "\u2028",
    " end",
)


def shades(page, method=0):
    """The class of every token in view, by token."""
    return page.run(
        """
        const pane = document.querySelectorAll(".text")[arguments[0]];
        return Object.fromEntries([...pane.querySelectorAll("span")].map(
            (span) => [span.dataset.token, span.className.split(" ")[0]]));
        """,
        method,
    )


def kept_bit(data, layer, head, token):
    import base64

    bits = base64.b64decode(data["methods"][0]["layers"][layer]["bits"])
    stride = -(-len(data["pieces"]) // 8)
    return bits[head * stride + token // 8] >> token % 8 & 1


def test_it_opens_with_the_question_the_answers_and_the_text(opened):
    data = record(400, labels=("snapkv", "streaming-llm"))
    page = opened(data)
    assert page.one("h1").text == "What was kept of notes.txt"
    assert page.one("#question").text == "When?"
    cards = [card.text for card in page.all(".card")]
    assert len(cards) == 4  # the last is the curve's
    assert "snapkv says <i>nine</i>" in cards[1]
    assert "3.0 MiB of 1.0 GiB held (0.3%)" in cards[1]
    assert "≠ other answer" in cards[1]
    assert "the gate" in page.one(".text").text.replace("\n", "") or page.one(".text").text
    assert page.browser.title == "What was kept of notes.txt"


def test_the_layer_and_head_pickers_show_that_heads_bits(opened):
    data = record(400, layers=3, heads=2)
    page = opened(data)
    assert page.run("return document.getElementById('head').disabled")
    everything = shades(page)
    assert set(everything.values()) - {"k0", "k10"}
    page.pick("#layer", "layer 1")
    page.pick("#head", "head 1")
    for token, level in shades(page).items():
        assert level == ("k10" if kept_bit(data, 1, 1, int(token)) else "k0")
    before = page.painted("canvas.overview")
    page.pick("#head", "head 0")
    assert page.painted("canvas.overview") != before
    assert "Votes of layer 1, head 0" in page.one("h4").text
    page.pick("#layer", "all layers")
    assert shades(page) == everything


def test_a_document_full_of_markup_stays_text(opened):
    pieces = [*NASTY, *[" word"] * 300]
    data = record(0, pieces=pieces, question=NASTY[0])
    data["request"]["documents"] = [NASTY[1]]
    data["full"]["text"] = NASTY[0]
    data["checked_answer"] = NASTY[2]
    data["methods"][0]["sentence"] = data["methods"][0]["label"] = NASTY[0]
    data["methods"][0]["answer"]["changes"] = [["gone", NASTY[0]], ["new", NASTY[1]]]
    data["curve"][1]["changes"] = [["new", NASTY[1]]]
    for span in data["spans"]:
        span["place"] = NASTY[1]
    page = opened(data)
    page.run("document.querySelector('.text').scrollTop = 0")
    page.one(".text").send_keys("\ue011")  # Home
    assert page.run("return window.ran") is None
    assert page.run("return document.scripts.length") == 2
    assert not page.all("img, b")
    shown = page.run("return document.querySelector('.text').textContent")
    assert shown.startswith(NASTY[0] + NASTY[1] + NASTY[2] + NASTY[3])
    assert page.one("#question").text == NASTY[0]
    assert NASTY[1] in page.one("h1").text
    assert page.one("#lead").text == NASTY[0]
    assert NASTY[1] in page.one("#spans").text
    assert NASTY[1] in page.one("#memory-answer").text


def test_keys_move_from_token_to_token_and_say_so(opened):
    data = record(400)
    page = opened(data)
    pane = page.one(".text")
    pane.send_keys("\ue011")  # Home
    status = page.one(".status")
    assert status.get_attribute("aria-live") == "polite"
    assert status.text.startswith('token 0 "the": kept by ')
    pane.send_keys("\ue014")  # right
    assert status.text.startswith("token 1 ")
    pane.send_keys("\ue010")  # End
    assert status.text.startswith("token 399 ")
    assert "399" in shades(page)
    pane.send_keys("\ue012")  # left
    assert status.text.startswith("token 398 ")


def test_everything_is_reached_with_the_tab_key(opened):
    page = opened(record(400, labels=("one", "two")))
    reached = []
    for _ in range(40):
        page.browser.switch_to.active_element.send_keys("\ue004")
        name = "const e = document.activeElement; return e.id || e.className || e.tagName"
        reached.append(page.run(name))
        if page.run("return document.activeElement === document.body"):
            break
    for wanted in ("skip", "layer", "find", "text", "layers", "spans", "facts"):
        assert wanted in reached, reached
    assert reached.count("text") == 2


def test_screen_readers_get_names_for_everything(opened):
    page = opened(record(400, labels=("one", "two")))
    for element in page.all("canvas, select, input, button, .text, [role=region], table"):
        named = element.accessible_name or element.find_elements("css selector", "caption")
        assert named, element.get_attribute("outerHTML")[:200]
    assert page.run("return document.documentElement.lang") == "en"
    levels = [int(each.tag_name[1]) for each in page.all("h1, h2, h3, h4")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    label = page.one("canvas.histogram").get_attribute("aria-label")
    assert label.startswith("Kept of the four quarters of the prompt: ")


def test_find_goes_to_the_next_place(opened):
    pieces = ["aa", " Needle", " hay", " hay", " needle", " [x", *[" hay"] * 300]
    page = opened(record(0, pieces=pieces))
    page.one(".text").send_keys("\ue011")
    box = page.one("#find")
    box.send_keys("needle\ue007")
    assert page.one("#found").text == "token 1"
    box.send_keys("\ue007")
    assert page.one("#found").text == "token 4"
    box.send_keys("\ue007")
    assert page.one("#found").text == "token 1"
    box.clear()
    box.send_keys("[x\ue007")
    assert page.one("#found").text == "token 5"
    box.clear()
    box.send_keys("camel\ue007")
    assert page.one("#found").text == "not found"


def test_the_part_that_the_answer_needs_is_marked_and_shown(opened):
    page = opened(record(400))
    assert page.one(".status").text.startswith("token 133 ")
    assert page.all(".need")
    first = page.one("#spans tbody tr")
    assert "§ 9.11" in first.text
    assert "133 to 148" in first.text
    assert "yes" in first.text
    page.one(".text").send_keys("\ue011")
    first.find_element("css selector", "button").click()
    assert page.one(".status").text.startswith("token 133 ")


def test_methods_scroll_together(opened):
    page = opened(record(4000, labels=("one", "two")))
    page.run("document.querySelectorAll('.text')[0].scrollTop = 900")
    wait = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
    page.browser.execute_async_script(wait)
    assert page.run("return document.querySelectorAll('.text')[1].scrollTop") == 900
    assert list(shades(page, 0)) == list(shades(page, 1))


def test_a_record_without_scores_or_checks_is_shown(opened):
    data = record(200)
    data["spans"] = []
    for layer in data["methods"][0]["layers"]:
        layer |= {"votes": None, "scores": None, "cuts": None}
    data["methods"][0]["heat"] = None
    page = opened(data)
    assert "This method shows no scores" in page.one("h4").text
    assert not page.one("canvas.overview").is_displayed()
    assert "Not measured" in page.one("#spans-note").text


def test_a_hundred_thousand_tokens_are_smooth(opened):
    """32 layers of 8 heads, two methods; bounds are for an idle machine and scaled to this one."""
    page = opened(record(100_000, layers=32, heads=8, labels=("snapkv", "other")))
    slow = page.slowness()
    assert int(page.run("return document.documentElement.dataset.ready")) < 3000 * slow
    assert len(page.all(".text span")) < 6000
    page.pick("#layer", "layer 7")  # decodes what this layer needs
    picked = [page.pick("#head", f"head {head}") for head in range(8)]
    assert sorted(picked)[4] < 150 * slow, picked
    frames = page.browser.execute_async_script(
        """
        const done = arguments[0];
        const pane = document.querySelector(".text");
        const times = [];
        let last = performance.now();
        function step() {
          const now = performance.now();
          times.push(now - last);
          last = now;
          pane.scrollTop += 3000;
          if (times.length < 40) requestAnimationFrame(step); else done(times);
        }
        requestAnimationFrame(step);
        """
    )
    assert sorted(frames)[20] < 50 * slow, frames
    assert page.run("return document.querySelector('.text').scrollTop") > 50_000
