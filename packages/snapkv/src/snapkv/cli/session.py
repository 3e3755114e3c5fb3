"""What `ask` and `generate` show: an answer and what it took, beside the full cache's or alone."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
import typer
from rich.console import Console
from rich.text import Text

from snapkv import __version__
from snapkv.app.answering import Answer, TextSink
from snapkv.app.models import LoadedModel
from snapkv.app.settings import GenerationSettings
from snapkv.cli.changes import Change
from snapkv.cli.grid import Grid, say, show
from snapkv.cli.notes import Note, is_safe, notes_on, said_of_votes
from snapkv.cli.options import RunOptions
from snapkv.cli.standard_output import write, write_json
from snapkv.hf.placement import device_of
from snapkv.policies.default import method_name
from snapkv.validation import format_bytes


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked, and how to answer it.

    Attributes:
        loaded: the model that answers.
        settings: how it generates.
        answered: gives the answer of the method, whose text goes where it is told meanwhile.
        full: gives the full cache's answer, or the first so many tokens of it.
        exactly: the change of the options that makes the reading exact; empty where it is.
        own_bits: why bits that would be chosen are the model's own; empty where they are not.
        sources: gives lines between an answer and what it took, once there is an answer.
    """

    loaded: LoadedModel
    settings: GenerationSettings
    answered: Callable[[TextSink | None], Answer]
    full: Callable[[int | None], Answer]
    exactly: Change
    own_bits: str = ""
    sources: Callable[[], Sequence[Text]] = tuple


def show_answers(
    asked: Asked, options: RunOptions, request: dict[str, Any], typed: Sequence[str]
) -> None:
    """Answer once or, to compare, twice; then show what was asked for."""
    if options.compare:
        _warm_up(asked.loaded.model)
        answers = [asked.answered(None), asked.full(None)]
    else:
        answers = [asked.answered(None if options.json else write)]
    if not options.json:
        _show(answers, asked.sources(), safe=is_safe(answers, options))
    notes = notes_on(answers, options, typed, exactly=asked.exactly, full_start=asked.full)
    if asked.own_bits:
        line = Text(f"bits: {asked.own_bits}")
        notes.append(Note(key="bits", record={"note": asked.own_bits}, lines=[line]))
    if options.json:
        about = {"model": asked.loaded.description(), **request}
        about["prefill"] = options.reading.describe()
        about["settings"] = asdict(asked.settings)
        runs = [answer_record(each, with_layers=options.verbose) for each in answers]
        told = {note.key: note.record for note in notes}
        write_json({"answer": runs[0]["text"]} | about | {"runs": runs} | told | versions())
    else:
        say([line for note in notes for line in note.lines], to_errors=not options.compare)
    if status := max(note.status for note in notes):
        raise typer.Exit(status)


def _show(answers: Sequence[Answer], sources: Sequence[Text], *, safe: bool) -> None:
    """Two answers side by side on standard output, or below one that is there what it took."""
    if len(answers) > 1:
        show(answers_table(answers, with_text=True, safe=safe))
        say(sources)
    else:
        write("\n")
        say(sources, to_errors=True)
        Console(stderr=True).print(answers_table(answers, with_text=False, safe=safe))


def _warm_up(model: Any) -> None:
    """Touch the weights once, or the first of two runs would pay for reading them."""
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.int64, device=device_of(model)))


def answers_table(answers: Sequence[Answer], *, with_text: bool, safe: bool) -> Grid:
    """A column per answer: its text where that was not shown yet, and what it cost."""
    columns = [_costs(answer, safe=safe) for answer in answers]
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in columns[0]]
    if with_text:
        rows.insert(0, ("answer", *(answer.text.strip() for answer in answers)))
    names = (method_name(answer.policy) for answer in answers)
    return Grid(headings=("", *names), rows=tuple(rows), left=1 + len(answers), ruled=with_text)


def _costs(answer: Answer, *, safe: bool) -> dict[str, str]:
    cache = answer.cache
    costs = {
        "prompt tokens": f"{answer.prompt_tokens:,}",
        "kept tokens": f"{answer.kept_tokens:,.0f} of {answer.prompt_tokens:,}",
        "generated": f"{answer.new_tokens:,}",
        "lost votes": said_of_votes(cache, safe=safe),
        "cache": f"{format_bytes(cache.held_bytes)} ({cache.held_bytes / cache.full_bytes:.0%})",
        "full cache": format_bytes(cache.full_bytes),
        "first token": f"{answer.first_token_ms / 1000:.1f} s",
        "per token": "-" if answer.token_ms is None else f"{answer.token_ms:.0f} ms",
        "whole answer": f"{answer.total_ms / 1000:.1f} s",
    }
    if drafts := answer.drafts:
        length, passes = drafts["acceptance_length"], drafts["passes"]
        costs["tokens per pass"] = f"{length:.2f}, {passes:,} passes ({drafts['method']})"
    return costs


def answer_record(answer: Answer, *, with_layers: bool) -> dict[str, Any]:
    """An answer ready for JSON; layer by layer is long, so only where that is asked for."""
    record = {"method": method_name(answer.policy), **asdict(answer)}
    if not with_layers:
        record["cache"] = without(record["cache"], "layers")
    return record


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def versions() -> dict[str, str]:
    """What computed it, for a record."""
    return {
        "snapkv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
