"""The tables that people read; programs read the JSON."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from snapkv.answering import Answer
from snapkv.cache import format_bytes


def answers_table(answers: Sequence[Answer], *, with_text: bool) -> Table:
    """A column per answer: its text where that was not shown yet, and what it cost."""
    table = Table("", *[answer.policy["name"] for answer in answers])
    if with_text:
        texts = [Text(answer.text.strip()) for answer in answers]
        table.add_row("answer", *texts, end_section=True)
    columns = [_costs(answer) for answer in answers]
    for name in columns[0]:
        table.add_row(name, *[column[name] for column in columns])
    return table


def _costs(answer: Answer) -> dict[str, str]:
    cache = answer.cache
    return {
        "prompt tokens": f"{answer.prompt_tokens:,}",
        "kept tokens": f"{cache.kept_tokens:,.0f} of {cache.seen_tokens:,}",
        "cache": f"{format_bytes(cache.held_bytes)} ({cache.held_bytes / cache.full_bytes:.0%})",
        "full cache": format_bytes(cache.full_bytes),
        "first token": f"{answer.first_token_ms / 1000:.1f} s",
        "per token": "-" if answer.token_ms is None else f"{answer.token_ms:.0f} ms",
    }
