"""The page of the comparison with stock vLLM, made of nothing but its rows."""

import statistics
from collections.abc import Sequence

from benchmarks.records import Row, environment_line, markdown_table

BLOCK_TOKENS = 128
ANSWER_TOKENS = 32


def render(rows: Sequence[Row]) -> str:
    """The page, out of nothing but rows."""
    equal = next(row for row in rows if row["part"] == "budget of the prompt")
    library = next(row for row in rows if row["part"] == "library")
    table = [_line(name, rows) for name in ("stock", "snapkv")]
    read = next(row for row in rows if row["part"] == "reading")
    fast = [row for row in rows if row["part"] == "speed"]
    first = fast[0]
    header = ("engine", "seconds", "prefill s", "decode s", "decode steps", "most at once", "found")
    return f"""# Serving: stock vLLM and compressed prompts

{environment_line(fast)}, vLLM {rows[0]["environment"]["vllm"]}.
Made by `python -m benchmarks.serving`; rows in `serving.jsonl`.

With a budget of the prompt's length, {equal["same_answers"]} of {equal["prompts"]} greedy answers
of {ANSWER_TOKENS} tokens are stock vLLM's (float32).

At budget {library["budget"]}, {library["same_sets"]} of {library["sets"]} kept sets (one a prompt,
layer and KV head) are those of `CompressedCache`, and {library["same_answers"]} of
{library["prompts"]} answers. Of stock vLLM's answers {library["stock_like_transformers"]} are those
of transformers.

{first["requests"]} requests of {first["prompt_tokens"]:,} prompt and {first["new_tokens"]} new
tokens at once, in {first["blocks"]} blocks of {BLOCK_TOKENS} tokens, bfloat16; kernel
{first["votes"]["kernel_size"]}, max pooling. Either engine in turns, median of the rounds. "Found"
are the magic numbers in the answers.

{markdown_table(header, table)}

Reading one prompt of {read["prompt_tokens"]:,} tokens up to its first token, nothing else running:
{read["stock_seconds"]["p50"]:.2f} s by stock vLLM, {read["snapkv_seconds"]["p50"]:.2f} s with its
compression; the median ratio of {read["prompts"]} pairs is {read["against_stock"]["p50"]:.3f}
({read["against_stock"]["p20"]:.3f} to {read["against_stock"]["p80"]:.3f}; commit
{read["environment"]["commit"]}).
"""


def _line(name: str, rows: Sequence[Row]) -> list[str]:
    mine = [row for row in rows if row.get("engine") == name]

    def median(key: str) -> float:
        return statistics.median(row[key] for row in mine)

    label = name if mine[0]["budget"] is None else f"{name}, budget {mine[0]['budget']}"
    seconds = [f"{median(f'{part}seconds'):.1f}" for part in ("", "prefill_", "decode_")]
    counts = [f"{median(key):.0f}" for key in ("decode_steps", "most_running")]
    return [label, *seconds, *counts, f"{median('needles'):.0f}/{mine[0]['requests']}"]
