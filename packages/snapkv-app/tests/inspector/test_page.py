"""The page as a file: complete, without network requests, and with escaped documents."""

import base64
import hashlib
import html
import json
import re

from tests.inspector.synthetic import page as made

NASTY = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "{{script}}",
    "&lt;b&gt;",
    "\u2028\u2029\0",
    "\ud800",
    "\\u003c",
]


def nasty():
    return made(0, pieces=[*NASTY, *"abcdefghij" * 10], question=NASTY[0], labels=NASTY[:2])


def test_page_contains_its_data_unchanged():
    page = nasty()
    written = re.search(r'id="data">(.*?)</script>', page.html, re.S)[1]
    assert json.loads(written) == json.loads(json.dumps(page.data()))


def test_document_cannot_end_the_data_block():
    page, plain = nasty().html, made(200).html
    assert page.count("<script") == plain.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert "<img" not in page
    page.encode("utf-8")


def test_only_the_pages_own_script_may_run():
    page = made(64).html
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page


def test_page_makes_no_network_requests():
    page = re.sub(r'id="data">.*?</script>', "", made(64).html, flags=re.S)
    page = re.sub(r"'sha256-[^']*'", "", page)  # a digest may have any letters
    assert not re.search(r"https?://|//\w|@import|url\(|fetch\(|XMLHttp|import\(", page)
    assert "innerHTML" not in page


def test_no_placeholder_is_left():
    assert "{{" not in re.sub(r'id="data">.*?</script>', "", made(64).html, flags=re.S)


def test_notebook_shows_the_complete_page_in_a_frame():
    page = nasty()
    frame = page._repr_html_()
    assert frame.count("<") == frame.count(">") == 2, "the page is text of an attribute"
    assert "allow-same-origin" not in frame
    begin, end = frame.index('srcdoc="') + 8, frame.index('" title=')
    assert '"' not in frame[begin:end]
    assert html.unescape(frame[begin:end]) == page.html
    assert repr(page).startswith("The cache keeps 128 of 108 prompt tokens")
