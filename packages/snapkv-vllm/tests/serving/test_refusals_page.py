"""The page for users lists what is refused at the start, with the reason that is given."""

from pathlib import Path

from snapkv_vllm.refusals import _TABLE

PAGE = Path(__file__).parents[4] / "docs" / "serving.md"


def test_every_rule_is_a_row_of_the_page():
    rows = [row.split(" | ") for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    for _, rules in _TABLE:
        for what, _, remedy in rules:
            reason = remedy.partition(";")[0]
            assert any(
                row[0].startswith(f"| {what}") and row[1].startswith(reason) for row in rows
            ), f"{what}: {reason}"
