"""The page of the comparison with stock vLLM, made of nothing but its rows."""

import statistics
from collections.abc import Sequence

from benchmarks.records import Row, environment_line, markdown_table

BLOCK_TOKENS = 128
ANSWER_TOKENS = 32
ALONE, AT_ONCE = "reading", "reading at once"
"""Parts that read prompts up to their first tokens: one, and several."""
HEADS = "heads of different length"


def render(rows: Sequence[Row]) -> str:
    """The page, out of nothing but rows."""
    equal = next(row for row in rows if row["part"] == "budget of the prompt")
    library = next(row for row in rows if row["part"] == "library")
    fast = [row for row in rows if row["part"] == "speed"]
    pools = sorted({row["blocks"] for row in fast})
    table = [_line(name, blocks, fast) for blocks in pools for name in ("stock", "snapkv")]
    parted = "\n\n".join(_parted(row) for row in rows if row["part"] == HEADS)
    read = [_read(row) for row in rows if row["part"] in (ALONE, AT_ONCE)]
    first = fast[0]
    header = (
        "blocks",
        "engine",
        "seconds",
        "prefill s",
        "decode s",
        "decode steps",
        "most at once",
        "found",
    )
    return (
        f"""# Serving: stock vLLM and compressed prompts

{environment_line(fast)}, vLLM {rows[0]["environment"]["vllm"]}.
Made by `python -m benchmarks.serving`; rows in `serving.jsonl`.

With a budget of the prompt's length, {equal["same_answers"]} of {equal["prompts"]} greedy answers
of {ANSWER_TOKENS} tokens equal stock vLLM's (float32).

At budget {library["budget"]}, {library["same_sets"]} of {library["sets"]} kept sets (one for each
prompt, layer and KV head) equal those of `CompressedCache`, and so do {library["same_answers"]} of
{library["prompts"]} answers. Of stock vLLM's answers, {library["stock_like_transformers"]} equal
those of transformers.

{first["requests"]} requests at once, each with {first["prompt_tokens"]:,} prompt tokens and
{first["new_tokens"]} new ones, in pools of the given number of blocks of {BLOCK_TOKENS} tokens,
bfloat16; kernel {first["votes"]["kernel_size"]}, max pooling. The engines take turns; median of the
rounds. "Found" counts the magic numbers in the answers.

{markdown_table(header, table)}

Reading prompts up to their first tokens, with nothing else running. A pair is one run of each
engine in direct succession; the order alternates from pair to pair:

{chr(10).join(read)}

{parted}
""".rstrip()
        + "\n"
    )


def _parted(row: Row) -> str:
    blocks = row["blocks_held"]
    said = [
        f"{1000 * row[f'equal_heads_{key}']['p50']:.0f} {what} with equal heads, "
        f"{1000 * row[f'adakv_{key}']['p50']:.0f} with `adakv`, median ratio "
        f"{row[ratio]['p50']:.3f} ({row[ratio]['p20']:.3f} to {row[ratio]['p80']:.3f})"
        for key, what, ratio in (
            ("seconds", "ms a step", "against_equal_heads"),
            ("processor_seconds", "ms of processor time", "processor_against_equal_heads"),
        )
    ]
    return (
        f"Generating with heads of different length (`adakv`) beside equal heads (`snapkv`): "
        f"{row['requests']} requests of {row['prompt_tokens']:,} prompt tokens side by side, "
        f"budget {row['budget']}, {row['steps']} pairs of steps that only generate, in turns, "
        f"OMP_NUM_THREADS={row['environment']['threads']}: "
        f"{'; '.join(said)}; {blocks['equal_heads']} and {blocks['adakv']} "
        f"blocks of {BLOCK_TOKENS} tokens held when all prompts were read; commit "
        f"{row['environment']['commit']}"
    )


def _read(row: Row) -> str:
    at_once = row.get("prompts_at_once", 1)
    prompts = "one prompt" if at_once == 1 else f"{at_once} prompts at once"
    clocks = [("seconds", "seconds", "against_stock")]
    if "processor_against_stock" in row:
        clocks.append(("processor_seconds", "of processor time", "processor_against_stock"))
    said = [
        f"{row[f'stock_{key}']['p50']:.2f} {what} by stock vLLM, {row[f'snapkv_{key}']['p50']:.2f} "
        f"with compression, median ratio {row[ratio]['p50']:.3f} ({row[ratio]['p20']:.3f} to "
        f"{row[ratio]['p80']:.3f})"
        for key, what, ratio in clocks
    ]
    return (
        f"- {prompts} of {row['prompt_tokens']:,} tokens, {row.get('pairs', 16)} pairs: "
        f"{'; '.join(said)}; commit {row['environment']['commit']}"
    )


def _line(name: str, blocks: int, rows: Sequence[Row]) -> list[str]:
    mine = [row for row in rows if row["engine"] == name and row["blocks"] == blocks]

    def median(key: str) -> float:
        return statistics.median(row[key] for row in mine)

    label = name if mine[0]["budget"] is None else f"{name}, budget {mine[0]['budget']}"
    seconds = [f"{median(f'{part}seconds'):.1f}" for part in ("", "prefill_", "decode_")]
    counts = [f"{median(key):.0f}" for key in ("decode_steps", "most_running")]
    return [str(blocks), label, *seconds, *counts, f"{median('needles'):.0f}/{mine[0]['requests']}"]
