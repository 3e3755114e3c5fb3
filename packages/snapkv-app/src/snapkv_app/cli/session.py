"""Print the answer of `ask` and `generate` with its costs, alone or next to the full cache's."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
import typer
from rich.console import Console
from rich.text import Text

from snapkv import __version__
from snapkv.hf.placement import device_of
from snapkv.policies.default import method_name
from snapkv.validation import format_bytes, without_controls
from snapkv_app.answering import Answer
from snapkv_app.cli.grid import Grid, say, show
from snapkv_app.cli.loading import say_if_demo
from snapkv_app.cli.notes import Note, format_lost_votes, notes_on
from snapkv_app.cli.sources import Source
from snapkv_app.cli.standard_output import write, write_json

_REQUEST = (
    *("question", "prompt", "documents", "warnings"),
    *("library", "sources", "recompute", "passages"),
)
_NOTES = ("lost_votes", "comparison", "check", "bits")
"""Keys of the JSON object that are null if they do not apply to the answer."""


def show_answers(source: Source) -> None:
    """Compute the answer and, to compare, the full cache's answer, and print the results.

    The answer, the comparison or one JSON object is printed on standard output. Progress and the
    table below an answer are printed on standard error.

    Raises:
        SnapKVError: an answer cannot be computed, see `Source.answer`.
        Exit: the first tokens differ, with ``--check``; the exit status is 3.
    """
    options = source.options
    model, settings = source.loaded.model, source.settings
    if options.compare:
        _warm_up(model)
        answers = [source.answer(None), source.full_answer(settings.max_new_tokens)]
    else:
        answers = [source.answer(None if options.json else write)]
    if not options.json:
        _show(answers, [Text(without_controls(line)) for line in source.cited()])
    _, why_exact = source.bits
    notes = notes_on(answers, source)
    lines = [Text(f"bits: {why_exact}")] if why_exact else []
    notes.append(Note(key="bits", record={"note": why_exact or None}, lines=lines))
    if options.json:
        about = {"model": source.loaded.description(), **dict.fromkeys(_REQUEST)}
        about |= source.request() | {"prefill": options.reading.describe()}
        runs = [answer_record(each, with_layers=options.verbose) for each in answers]
        noted = dict.fromkeys(_NOTES) | {note.key: note.record for note in notes}
        about |= {"settings": asdict(settings), "runs": runs}
        write_json({"answer": runs[0]["text"]} | about | noted | versions())
    else:
        say([line for note in notes for line in note.lines], to_errors=not options.compare)
    say_if_demo(source.loaded)
    if status := max(note.status for note in notes):
        raise typer.Exit(status)


def _show(answers: Sequence[Answer], sources: Sequence[Text]) -> None:
    """Print two answers side by side on standard output, or the costs of one on standard error.

    The text of a single answer must have been printed already. `sources` are printed next to the
    table, on the same stream.
    """
    if len(answers) > 1:
        show(answers_table(answers, with_text=True))
        say(sources)
    else:
        write("\n")
        say(sources, to_errors=True)
        Console(stderr=True).print(answers_table(answers, with_text=False))


def _warm_up(model: Any) -> None:
    """Run the model on one token, so that loading the weights does not slow the first answer."""
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.int64, device=device_of(model)))


def answers_table(answers: Sequence[Answer], *, with_text: bool) -> Grid:
    """Build a table with a column for each answer, which shows its costs.

    With `with_text`, the text of the answer is above its costs.
    """
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
        "lost votes": format_lost_votes(cache),
        "cache": f"{format_bytes(cache.held_bytes)} ({cache.held_bytes / cache.full_bytes:.0%})",
        "full cache": format_bytes(cache.full_bytes),
        "first token": f"{answer.first_token_ms / 1000:.1f} s",
        "per token": "-" if answer.token_ms is None else f"{answer.token_ms:.0f} ms",
        "whole answer": f"{answer.total_ms / 1000:.1f} s",
    }
    if drafts := answer.drafts:
        length, passes = drafts["acceptance_length"], drafts["passes"]
        costs["tokens per pass"] = f"{length:.2f}, {passes:,} passes ({drafts['method']})"
    if cache.get("steps"):
        costs["steps"] = cache["steps"]
    return costs


def answer_record(answer: Answer, *, with_layers: bool) -> dict[str, Any]:
    """Return an answer as a new dict that JSON can represent.

    Its keys are "method", the name of the method, and the fields of `Answer`. The list of layers in
    the report of the cache, which is long, is left out unless `with_layers`.
    """
    record = {"method": method_name(answer.policy), **asdict(answer)}
    if not with_layers:
        record["cache"] = without(record["cache"], "layers")
    return record


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def versions() -> dict[str, str]:
    """Return the versions of snapkv, torch and transformers by name, to be put into results."""
    return {
        "snapkv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
