"""`ask` of files: all of them, or of longer ones the passages that fit the question best."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.text import Text

from snapkv.policies import Policy
from snapkv.validation import without_controls
from snapkv_app import text_files
from snapkv_app.answering import MOST_CHARACTERS_PER_TOKEN
from snapkv_app.cli.announcing import announce
from snapkv_app.cli.changes import changed_command, explained_length, leaves_room
from snapkv_app.cli.from_files import answer_from_files
from snapkv_app.cli.options import AskOptions
from snapkv_app.library import records
from snapkv_app.models import LoadedModel
from snapkv_app.passages import Excerpts, best_passages
from snapkv_app.prompts import Prompt, question_prompt

_MOST_PLACES = 12
"""As many are named in the line below an answer; `--json` has all."""


def answer_from_passages(
    options: AskOptions,
    policy: Policy,
    documents: Sequence[records.Text],
    question: str,
    request: dict[str, Any],
    typed: Sequence[str],
) -> None:
    """Answer from the documents; where they are too long, say what to type or what was read."""
    said: list[Text] = []
    read_by: list[LoadedModel] = []
    request["question"] = question

    def made(loaded: LoadedModel, read: Sequence[records.Text]) -> Prompt:
        text = text_files.join(read)
        prompt = question_prompt(
            loaded.tokenizer, text, question, answer_start=options.answer_start
        )
        return prompt.hiding_question() if policy.needs_reconstruction_pass else prompt

    def fits(loaded: LoadedModel, read: Sequence[records.Text]) -> bool:
        if loaded.max_tokens is None:
            return True
        if sum(len(each.text) for each in read) > MOST_CHARACTERS_PER_TOKEN * loaded.max_tokens:
            return False
        tokens = len(made(loaded, read).encoded(loaded.tokenizer)[0])
        return loaded.has_positions(tokens + options.max_new_tokens)

    def prompt(loaded: LoadedModel) -> Prompt:
        read_by.append(loaded)
        if not options.passages or fits(loaded, documents):
            return made(loaded, documents)
        announce("looking for the passages that fit the question best")
        found = best_passages(documents, question, lambda read: fits(loaded, read))
        request["passages"] = {name: asdict(found)[name] for name in ("read", "of", "places")}
        said.append(Text(without_controls(_line(found, is_of_one=len(documents) == 1))))
        return made(loaded, found.documents)

    def command() -> str | None:
        helps = not options.passages and leaves_room(read_by[0], question, options.settings())
        return changed_command(typed, {"passages": True}) if helps else None

    with explained_length(command):
        answer_from_files(
            options, policy, prompt, request, typed, system=None, sources=lambda: said
        )


def _line(found: Excerpts, *, is_of_one: bool) -> str:
    """Which passages were read, and where they are."""
    shown, places = [], found.places[:_MOST_PLACES]
    for name, own in groupby(places, key=lambda place: place.document):
        lines = ", ".join(f"{first:,}-{last:,}" for first, last in (each.lines for each in own))
        shown.append(f"lines {lines}" if is_of_one else f"{name}, lines {lines}")
    if more := len(found.places) - len(places):
        shown.append(f"and {more:,} more places")
    return f"read {found.read:,} of {found.of:,} passages: {'; '.join(shown)}"
