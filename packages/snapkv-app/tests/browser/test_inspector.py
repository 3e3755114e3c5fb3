"""The inspector's page in a real browser: what is shown, moved, pointed at, and how fast."""

import pytest
from selenium.webdriver import ActionChains

from snapkv.page import Page, Shown
from tests.inspector.synthetic import FULL, HEADS, SINKS, VOTERS, WINDOW, page

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
RIGHT, LEFT, HOME, END, ENTER = "\ue014", "\ue012", "\ue011", "\ue010", "\ue007"


def shades(opened):
    """The class of every token in view, by token."""
    return opened.run(
        """
        return Object.fromEntries([...document.querySelectorAll(".text span")].map(
            (span) => [span.dataset.token, span.className.split(" ")[0]]));
        """
    )


def expected_shade(made, stop, token):
    count = int(made.methods[0].stops[stop].counts[token])
    return f"k{max(1, int(10 * count / HEADS + 0.5)) if count else 0}"


def top_voters(made, token):
    votes = made.methods[0].ballot.votes[:, token]
    first = len(made.pieces) - VOTERS
    return [first + voter for voter in votes.topk(3).indices.tolist()]


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_question_sentences_slider_and_answer_are_above_the_fold(opened, emulated, width, height):
    emulated(width=width, height=height)
    seen = opened(page(400, question="When does the gate open, and who has the key to it?"))
    for selector in ("#title", "#question", "#kept", "#verdict", "#budget", "#marks", ".card"):
        rect = seen.one(selector).rect
        assert rect["height"] > 0
        assert rect["y"] + rect["height"] <= height, selector
    kept, verdict = seen.one("#kept").text, seen.one("#verdict").text
    assert kept.startswith("The cache keeps 128 of 400 prompt tokens per head on average: 4.0 MiB")
    assert verdict == "Its answer is the same as the full cache's."
    assert [card.text for card in seen.all(".card")] == [f"Answer\n{FULL}"]
    assert " ms" not in seen.one("body").text, "no times"


def test_slider_updates_the_sentences_answers_and_map(opened):
    made = page(400)
    seen = opened(made)
    assert [mark.text for mark in seen.all("#marks span")] == ["≠ 64", "✓ 128", "≠ 512"]
    for stop, answer in enumerate(["ten", None, "snapkv says <i>nine</i>"]):
        seen.slide(stop)
        said = made.methods[0].stops[stop].sentences
        assert [seen.one("#kept").text, seen.one("#verdict").text] == list(said)
        assert seen.one("#budget").get_attribute("aria-valuetext").endswith(" ".join(said))
        assert [card.text for card in seen.all(".card")] == (
            [f"Full cache\n{FULL}", f"snapkv\n{answer}"] if answer else [f"Answer\n{FULL}"]
        )
        for token, shade in shades(seen).items():
            assert shade == expected_shade(made, stop, int(token)), token
        assert seen.one("#marks .at").text == seen.all("#marks span")[stop].text
    seen.one("#budget").send_keys(LEFT)
    assert seen.one("#verdict").text == "Its answer is the same as the full cache's."


def test_pointer_shows_the_voters_of_a_token(opened):
    made = page(400)
    seen = opened(made)
    seen.one(".text").send_keys(HOME)
    for token in (40, 57, 41):
        ActionChains(seen.browser).move_to_element(seen.token(token)).perform()
        check_voters(made, seen, token)
    ActionChains(seen.browser).move_to_element(seen.one("#title")).perform()
    assert "always kept" in seen.one("#status").text, "of the token under the cursor again"


def check_voters(made, seen, token):
    status = seen.one("#status").text
    count = int(made.methods[0].stops[1].counts[token])
    assert f": kept by {count} of {HEADS} heads; most votes from " in status
    voters = top_voters(made, token)
    marked = seen.run(
        "return [...document.querySelectorAll('#voters span')].map((span) => span.className)"
    )
    first = len(made.pieces) - VOTERS
    assert {first + at for at, name in enumerate(marked) if name} == set(voters)
    votes = made.methods[0].ballot.votes[:, token]
    part = float(votes[voters[0] - first] / votes.sum())
    assert f"({round(100 * part)}%)" in status


@pytest.mark.parametrize("how", ["keys", "tap"])
def test_keys_and_taps_show_the_voters_of_a_token(opened, how):
    made = page(400)
    seen = opened(made)
    pane = seen.one(".text")
    if how == "keys":
        pane.send_keys(HOME, *[RIGHT] * 40)
        check_voters(made, seen, 40)
        pane.send_keys(RIGHT, LEFT, LEFT)
        check_voters(made, seen, 39)
    else:
        pane.send_keys(HOME)
        seen.token(40).click()
        check_voters(made, seen, 40)
        assert seen.token(40).get_attribute("class").endswith("current")


def test_scrolling_draws_only_rows_that_are_not_yet_drawn(opened):
    """The browser reports the scroll of a key one frame later; a click may be under way by then."""
    stays, last_is_drawn = opened(page(4000)).browser.execute_async_script(
        """
        const [done] = arguments;
        const frame = () => new Promise((next) => {
            requestAnimationFrame(() => requestAnimationFrame(next));
        });
        (async () => {
            const pane = document.querySelector(".text");
            pane.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
            const token = pane.querySelector("[data-token='40']");
            await frame();
            const stays = token.isConnected;
            pane.scrollTop = 1e6;
            await frame();
            done([stays, pane.querySelector("[data-token='3999']") !== null]);
        })();
        """
    )
    assert stays
    assert last_is_drawn


def test_page_opens_at_the_strongest_vote(opened):
    made = page(4000)
    seen = opened(made)
    check_voters(made, seen, made.methods[0].ballot.strongest)
    assert str(made.methods[0].ballot.strongest) in shades(seen)


def test_tokens_that_are_always_kept_are_labelled(opened):
    seen = opened(page(400))
    pane = seen.one(".text")
    for key, steps, last in ((HOME, SINKS - 1, "first"), (END, WINDOW - 1, "last")):
        pane.send_keys(key)
        said = f"kept by 90 of 90 heads; always kept, as one of the {last} tokens"
        assert said in seen.one("#status").text
        pane.send_keys(*[RIGHT if key == HOME else LEFT] * steps)
        assert said in seen.one("#status").text
        pane.send_keys(RIGHT if key == HOME else LEFT)
        assert "most votes from" in seen.one("#status").text
    assert not seen.one("#found").text


def test_question_read_after_compression_has_no_votes(opened):
    made = page(400)
    later = Page(made.title, "", [*made.pieces, " when", "?"], made.methods, made.full)
    later.methods[0].stops[1].counts.resize_(402)[-2:] = HEADS
    seen = opened(later)
    assert len(seen.all("#voters span")) == VOTERS
    seen.one(".text").send_keys(END)
    assert seen.one("#status").text == '"?": kept by 90 of 90 heads; read after the votes'
    seen.one(".text").send_keys(LEFT, LEFT)
    assert seen.one("#status").text.endswith("; always kept, as one of the last tokens")


def test_methods_without_votes_say_that_nobody_voted(opened):
    made = page(400, labels=("snapkv", "h2o"))
    silent = Shown(label="h2o", stops=made.methods[1].stops[:1], unvoted=made.methods[1].unvoted)
    changed = Page(made.title, made.question, made.pieces, [made.methods[0], silent], made.full)
    seen = opened(changed)
    assert seen.one("#voting").is_displayed()
    seen.one("#method").send_keys("h2o")
    assert not seen.one("#stops").is_displayed()
    assert not seen.one("#voting").is_displayed()
    assert seen.one("#status").text.endswith("; this method counts no votes")
    assert "ten" in seen.all(".card")[1].text


def test_page_of_a_cache_alone_has_no_question_or_full_cache(opened):
    """`cache.show` makes such a page: no question, no voters, no full cache, one budget."""
    made = page(400)
    stop = made.methods[0].stops[0]
    shown = Shown(label="snapkv", stops=[stop], unvoted="")
    seen = opened(Page("What the cache kept", "", made.pieces, [shown]))
    assert seen.browser.title == "What the cache kept"
    assert seen.one("#map-title").text == "Kept tokens"
    for selector in ("#question", "#stops", "#method-label", "#voting"):
        assert not seen.one(selector).is_displayed()
    assert [card.text for card in seen.all(".card")] == ["Answer\nten"]
    assert seen.one("#status").text == f'"the": kept by {int(stop.counts[0])} of 90 heads'


def test_notebook_shows_the_page_in_a_frame(chromium, tmp_path):
    path = tmp_path / "cell.html"
    path.write_text(f"<!DOCTYPE html>{page(400)._repr_html_()}", encoding="utf-8")
    chromium.get(path.as_uri())
    chromium.switch_to.frame(0)
    try:
        assert chromium.find_element("id", "kept").text.startswith("The cache keeps 128 of 400")
        assert chromium.execute_script("return window.origin") == "null"
    finally:
        chromium.switch_to.default_content()
    assert not chromium.get_log("browser")


def test_markup_in_a_document_stays_text(opened):
    pieces = [*NASTY, *[" word"] * 300]
    data = page(0, pieces=pieces, question=NASTY[0], labels=NASTY[:2], title=NASTY[1]).data()
    data["full"] = NASTY[0]
    data["request"]["documents"] = [NASTY[1]]
    data["methods"][0]["unvoted"] = NASTY[0]
    for stop in data["methods"][0]["stops"]:
        stop["label"], stop["sentences"] = NASTY[2], [NASTY[0], NASTY[1]]
        stop["answer"] = {"text": NASTY[1], "same": False, "changes": [["new", NASTY[1]]]}
    seen = opened(data)
    seen.one(".text").send_keys(HOME)
    assert seen.run("return window.ran") is None
    assert seen.run("return document.scripts.length") == 2
    assert not seen.all("img, b")
    shown = seen.run("return document.querySelector('.text').textContent")
    assert shown.startswith(NASTY[0] + NASTY[1] + NASTY[2] + NASTY[3])
    for selector, said in {
        "#question": NASTY[0],
        "#title": NASTY[1],
        "#kept": NASTY[0],
        "#verdict": NASTY[1],
        "#marks": NASTY[2],
        "#answers": NASTY[1],
        "ins": NASTY[1],
        "#status": NASTY[0][1:9],
    }.items():
        assert said in seen.one(selector).text, selector
    assert NASTY[0] in seen.one("#method").text
    seen.one("summary").click()
    assert NASTY[1] in seen.one("#facts").text


def test_find_moves_to_the_next_match(opened):
    pieces = ["aa", " Needle", " hay", " hay", " needle", " [x", *[" hay"] * 300]
    seen = opened(page(0, pieces=pieces))
    seen.one(".text").send_keys(HOME)
    box = seen.one("#find")
    for wanted, said in (
        ("needle", "token 1"),
        ("", "token 4"),
        ("", "token 1"),
        ("[x", "token 5"),
        ("camel", "not found"),
    ):
        if wanted:
            box.clear()
        box.send_keys(wanted, ENTER)
        assert seen.one("#found").text == said


def test_page_with_100000_tokens_is_smooth(opened):
    """Bounds are for an idle machine and scaled to this one."""
    seen = opened(page(100_000))
    slow = seen.slowness()
    assert int(seen.run("return document.documentElement.dataset.ready")) < 3000 * slow
    assert len(seen.all(".text span")) < 6000
    moved = [seen.slide(stop) for stop in (0, 1, 2, 1, 0)]
    assert sorted(moved)[2] < 150 * slow, moved
    frames = seen.browser.execute_async_script(
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
    assert seen.run("return document.querySelector('.text').scrollTop") > 50_000
