"""The page for users names what is refused at the start; why, and what to do, the refusal says."""

import re
from pathlib import Path

from snapkv_vllm.refusals import _TABLE

PAGE = Path(__file__).parents[4] / "docs" / "serving.md"


def test_every_rule_is_in_a_row_of_the_page():
    rows = [row for row in PAGE.read_text("utf-8").splitlines() if row.startswith("| ")]
    for what, _, _ in (rule for _, rules in _TABLE for rule in rules):
        parts = re.split(r" and | in | where |, ", what)
        assert any(all(part in row for part in parts) for row in rows), what
