"""The tables that people read; programs read the JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from snapkv.app.answering import Answer
from snapkv.cli.grid import Grid
from snapkv.cli.lost_votes import LostInWords
from snapkv.library.about import About
from snapkv.library.library import Outcome
from snapkv.library.records import Record
from snapkv.plan import CacheNeeds, Footprint, Plan
from snapkv.plan.footprint import is_counted
from snapkv.policies.default import method_name
from snapkv.validation import format_bytes


def answers_table(answers: Sequence[Answer], *, with_text: bool) -> Grid:
    """A column per answer: its text where that was not shown yet, and what it cost."""
    columns = [_costs(answer) for answer in answers]
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in columns[0]]
    if with_text:
        rows.insert(0, ("answer", *(answer.text.strip() for answer in answers)))
    names = (method_name(answer.policy) for answer in answers)
    return Grid(headings=("", *names), rows=tuple(rows), left=1 + len(answers), ruled=with_text)


def _costs(answer: Answer) -> dict[str, str]:
    cache = answer.cache
    costs = {
        "prompt tokens": f"{answer.prompt_tokens:,}",
        "kept tokens": f"{answer.kept_tokens:,.0f} of {answer.prompt_tokens:,}",
        "generated": f"{answer.new_tokens:,}",
        "lost votes": str(LostInWords.of(cache)),
        "cache": f"{format_bytes(cache.held_bytes)} ({cache.held_bytes / cache.full_bytes:.0%})",
        "full cache": format_bytes(cache.full_bytes),
        "first token": f"{answer.first_token_ms / 1000:.1f} s",
        "per token": "-" if answer.token_ms is None else f"{answer.token_ms:.0f} ms",
        "whole answer": f"{answer.total_ms / 1000:.1f} s",
    }
    if drafts := answer.drafts:
        length, passes = drafts["acceptance_length"], drafts["passes"]
        costs["tokens per pass"] = f"{length:.2f}, {passes:,} passes ({drafts['method']})"
        if "full_cache_bytes" in drafts:
            costs["verified by"] = f"a full cache of {format_bytes(drafts['full_cache_bytes'])}"
    return costs


def outcomes_table(outcomes: Sequence[Outcome]) -> Grid:
    """A row per document that was added, or dropped."""
    rows = []
    for each in outcomes:
        is_there = each.what not in ("failed", "dropped")
        rows.append(
            (
                each.name,
                each.what,
                f"{each.tokens:,}" if is_there else "-",
                format_bytes(each.bytes) if is_there else "-",
                f"{each.seconds:.1f}" if each.seconds else "-",
            )
        )
    return Grid(headings=("document", "", "tokens", "on disk", "seconds"), rows=tuple(rows), left=2)


def documents_table(about: About, records: Sequence[Record]) -> Grid:
    """A row per document of a library."""
    rows = [
        (
            record.name,
            f"{record.tokens:,}",
            format_bytes(record.bytes),
            f"{len(record.chunks):,}",
            record.source or "-",
        )
        for record in records
    ]
    bits = "" if about.bits is None else f", in {about.bits}"
    return Grid(
        headings=("document", "tokens", "on disk", "passages", "from"),
        rows=tuple(rows),
        caption=f"read by {about.who}, kept by {about.policy_in_words}{bits}",
    )


def plan_table(plan: Plan) -> Grid:
    """What a request comes to with a full and with a compressed cache."""
    columns = [_plan_cells(plan, needs) for needs in (plan.full, plan.compressed)]
    rows = [
        ("weights", *[format_bytes(plan.footprint.weights_bytes)] * 2),
        *((name, *(column[name] for column in columns)) for name in columns[0]),
        ("decoding, at most", "1.0x", f"{plan.decode_speedup:.1f}x"),
    ]
    if plan.request.memory_bytes is not None:
        gains = [needs.throughput for needs in (plan.full, plan.compressed)]
        texts = ("-" if gain is None else f"{gain:.1f}x" for gain in gains)
        rows.append(("tokens per second, read together", *texts))
    return Grid(
        title=_plan_title(plan), headings=("", "full cache", "compressed"), rows=tuple(rows)
    )


def shapes_table(shapes: Mapping[str, dict[str, Any]]) -> Grid:
    """A row per published shape, see `snapkv.plan.shapes.described`."""
    rows = []
    for name, shape in shapes.items():
        slide = f" ({shape['sliding_layers']})" if shape["sliding_layers"] else ""
        rows.append(
            (
                name,
                f"{shape['parameters'] / 1e9:.1f}B",
                shape["weights"],
                f"{shape['layers']}{slide}",
                f"{shape['kv_heads']}x{shape['head_dim']}",
                f"{shape['kv_bytes_per_token'] / 1024:,.0f}",
                f"{shape['positions']:,}",
            )
        )
    return Grid(
        headings=("shape", "size", "weights", "layers", "KV", "KiB", "positions"),
        rows=tuple(rows),
        caption="layers: in brackets those that slide over a window. KV: heads and their width, or "
        "one latent. KiB: of cache for one more token of a long prompt, in 16 bits.",
    )


def _plan_title(plan: Plan) -> str:
    asked = plan.request
    prompts = f"{asked.batch:,} prompts" if asked.batch > 1 else "a prompt"
    return (
        f"{plan.model}, {_stored_as(plan.footprint)}: {prompts} of {asked.context_tokens:,} "
        f"tokens, {plan.kept_tokens:,} kept, answers of {asked.new_tokens:,}"
    )


def _stored_as(model: Footprint) -> str:
    """The dtype, and how weights are stored where that is counted."""
    if model.quantization is None or not is_counted(model.quantization):
        return model.dtype
    return f"{model.dtype}, weights in {model.quantization}"


def _plan_cells(plan: Plan, needs: CacheNeeds) -> dict[str, str]:
    """A column of the plan's table."""
    cells = {
        "cache behind the prompt": format_bytes(needs.cache_bytes),
        "beside the weights while reading, about": format_bytes(needs.prefill_peak_bytes),
        "all together": format_bytes(needs.total_bytes),
    }
    if plan.request.memory_bytes is not None:
        positions = plan.footprint.max_positions
        limit = None if positions is None else positions - plan.request.new_tokens
        for name, tokens in (
            ("longest prompt, read in one pass", needs.longest_prompt_tokens),
            ("longest prompt, read in pieces", needs.longest_prompt_in_pieces_tokens),
        ):
            cells[name] = _longest(tokens, limit)
        cells["largest batch, reading together"] = f"{needs.largest_batch:,}"
        cells["largest batch, decoding"] = f"{needs.largest_decoding_batch:,}"
    cells["read for every token"] = format_bytes(needs.step_bytes)
    if needs.step_ms is not None:
        cells["per token, at least"] = f"{needs.step_ms:.1f} ms"
    return cells


def _longest(tokens: int | None, limit: int | None) -> str:
    """Tokens that fit; where the model's positions end first, that is said."""
    if not tokens:
        return "none"
    return f"{tokens:,} (all positions)" if tokens == limit else f"{tokens:,}"
