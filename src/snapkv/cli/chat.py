"""`snapkv chat`: a conversation about documents."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapkv.app import text_files
from snapkv.cache.saving.writing import replacing
from snapkv.cli.options import RunOptions, with_options
from snapkv.cli.outputs import Output, require_output
from snapkv.errors import InvalidArgumentError, OutOfMemoryError, SnapKVError
from snapkv.validation import nearest

if TYPE_CHECKING:
    from snapkv.app.conversation import Conversation


@with_options(RunOptions)
def chat(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE...]", help="Text, source code, HTML, PDF or a folder"),
    ] = None,
    recall: Annotated[
        str | None,
        typer.Option(
            help="Where evicted tokens wait for the next question: host, a folder, or none",
            show_default="host, or none for methods that evict while generating",
        ),
    ] = None,
    *,
    options: RunOptions,
) -> None:
    """Answer questions about documents, one after another, in one small cache.

    Questions are read from standard input, a line each. /stats shows what the cache holds, /save
    FILE writes the conversation, /save --force FILE also where a file is there, /load FILE goes on
    with a saved one, /quit ends.
    """
    if options.compare:
        raise InvalidArgumentError("compare: expected it with ask, got it with chat; leave it out")
    if options.answer_start:
        raise InvalidArgumentError(
            "answer_start: expected it with ask, got it with chat; leave it out"
        )
    settings = options.settings()
    if files and text_files.STDIN in files:
        raise InvalidArgumentError(
            "files: expected files or folders, since the questions come from standard input, got "
            "-; pass a file"
        )
    read, warnings = text_files.read_noting(files) if files else ([], [])

    from snapkv.cli.policy import build_policy  # imports torch; what is wrong above is said before

    policy = build_policy(options)

    from rich.console import Console

    from snapkv.app.conversation import Conversation
    from snapkv.cli.loading import load_model

    loaded = load_model(options, Console(stderr=True))
    Chat(
        Conversation(loaded, policy, settings, document=text_files.join(read), recall=recall),
        load=lambda path: Conversation.load(path, loaded, settings, policy),
        inputs=[*(files or []), *([options.model] if options.model else [])],
        as_json=options.json,
        warnings=warnings,
    ).run()


class Chat:
    """Reads lines and answers or obeys them.

    Args:
        conversation: what the questions belong to.
        load: brings back a saved conversation.
        inputs: files and folders that were read, which no conversation is saved over.
        as_json: write one JSON object a line instead of text.
        warnings: what was not read of the documents, for the JSON.
    """

    def __init__(
        self,
        conversation: "Conversation",
        *,
        load: Callable[[str], "Conversation"],
        inputs: Sequence[str],
        as_json: bool,
        warnings: list[str],
    ) -> None:
        self._conversation = conversation
        self._load = load
        self._inputs = inputs
        self._as_json = as_json
        self._warnings = warnings
        self._saved: set[str] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._replace,
            "/help": self._help,
        }

    def run(self) -> None:
        """Go on until the input ends or says /quit; what goes wrong ends a turn only."""
        while (line := self._next()) not in (None, "/quit"):
            try:
                self._obey(line) if line.startswith("/") else self._answer(line)
            except OutOfMemoryError:
                raise
            except SnapKVError as error:
                self._note(f"snapkv: error: {error}")

    def _next(self) -> str | None:
        """The next line with something in it; None where there is none."""
        while True:
            if sys.stdin.isatty():
                self._note("> ", end="")
            line = sys.stdin.readline()
            if not line:
                return None
            if line.strip():
                return line.strip()

    def _obey(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            known = [*self._commands, "/quit"]
            raise InvalidArgumentError(
                f"command: expected one of {', '.join(known)}, got {name!r}{nearest(name, known)}"
            )
        self._commands[name](argument.strip())

    def _answer(self, question: str) -> None:
        from snapkv.cli.session import write, write_json

        if self._as_json:
            answer = self._conversation.ask(question)
            answered = {"question": question, **asdict(answer), "warnings": self._warnings}
            write_json(answered, indent=None)
        else:
            self._conversation.ask(question, on_text=write)
            write("\n")

    def _stats(self, _: str) -> None:
        from snapkv.cli.session import write, write_json
        from snapkv.cli.tables import conversation_lines

        report = self._conversation.report()
        if self._as_json:
            write_json({"stats": report}, indent=None)
        else:
            write("\n".join(conversation_lines(report)) + "\n")

    def _save(self, argument: str) -> None:
        first, _, rest = argument.partition(" ")
        forced = first == "--force"
        path = _named(rest.strip() if forced else argument)
        force = forced or os.path.realpath(path) in self._saved  # it is this conversation's own
        require_output("save", path, Output(), inputs=self._inputs, force=force)
        if forced:  # what is there need not be a saved cache
            with replacing(Path(path)) as partial:
                self._conversation.save(partial)
        else:
            self._conversation.save(path)
        self._saved.add(os.path.realpath(path))
        self._note(f"saved {path}")

    def _replace(self, path: str) -> None:
        self._conversation, self._warnings = self._load(_named(path)), []
        self._saved.clear()
        self._note(f"loaded {path}: {self._conversation.tokens:,} tokens")

    def _help(self, _: str) -> None:
        self._note("/stats  /save [--force] FILE  /load FILE  /quit; anything else is a question")

    def _note(self, text: str, end: str = "\n") -> None:
        """To standard error, which carries no answers."""
        sys.stderr.write(" ".join(text.split()) + end if end else text)
        sys.stderr.flush()


def _named(path: str) -> str:
    if not path:
        raise InvalidArgumentError("path: expected the name of a file, got none; add it")
    return path
