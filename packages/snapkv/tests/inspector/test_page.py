"""The page as a file: complete, without a network, and with nothing of the document as markup."""

import base64
import hashlib
import json
import re

from snapkv.inspector.page import filled_page
from tests.inspector.synthetic import record

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


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_the_data_is_what_was_given():
    data = record(0, pieces=[*NASTY, *"abcdefghij" * 10], question=NASTY[0])
    assert data_of(filled_page(data)) == data


def test_nothing_of_the_document_ends_its_block():
    page = filled_page(record(0, pieces=[*NASTY, *"abcdefghij" * 10], question=NASTY[0]))
    plain = filled_page(record(200))
    assert page.count("<script") == plain.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert "<img" not in page
    page.encode("utf-8")


def test_the_only_script_that_may_run_is_the_pages_own():
    page = filled_page(record(64))
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page


def test_the_page_asks_the_network_for_nothing():
    page = re.sub(r'id="data">.*?</script>', "", filled_page(record(64)), flags=re.S)
    page = re.sub(r"'sha256-[^']*'", "", page)  # a digest may have any letters
    assert not re.search(r"https?://|//\w|@import|url\(|fetch\(|XMLHttp|import\(", page)
    assert "innerHTML" not in page


def test_no_placeholder_is_left():
    assert "{{" not in re.sub(r'id="data">.*?</script>', "", filled_page(record(64)), flags=re.S)
