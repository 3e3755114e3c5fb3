"""`snapkv chat` holds a conversation about documents."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snapkv.cache.saving.writing import replacing
from snapkv.errors import OutOfMemoryError, SnapKVError, wrong
from snapkv.validation import DEFAULT, DEFAULT_BUDGET, format_bytes, nearest, without_controls
from snapkv_app import text_files
from snapkv_app.cli.announcing import announce_model
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.options import DRAFTS, RunOptions
from snapkv_app.cli.outputs import Output, require_output
from snapkv_app.cli.standard_output import FAILED, write, write_json

if TYPE_CHECKING:
    from snapkv.policies import Policy
    from snapkv_app.conversation import Conversation

EXAMPLES = {"chat": ("snapkv chat contract.pdf", "snapkv chat notes.txt --budget 2k --recall none")}


@with_options(RunOptions)
def chat(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Text, source code, HTML, PDF or a folder"),
    ] = None,
    recall: Annotated[
        str | None,
        typer.Option(
            help="Where evicted tokens are kept for the next question: host, a folder, or none",
            show_default="host; none for methods that evict while generating",
        ),
    ] = None,
    *,
    options: RunOptions,
) -> None:
    """Answer questions about documents, one after another, in one small cache.

    Questions are read from standard input, one per line. /stats shows the size of the cache. /drop
    thinking, /drop document and /drop 3 (a turn) remove these tokens from the cache for good. /save
    FILE writes the conversation, and /save --force FILE replaces an existing file. /load FILE
    continues a saved conversation. /quit ends the chat.

    Raises:
        InvalidArgumentError: an option is impossible in a conversation.
        DocumentError: a file cannot be read.
        SnapKVError: the model cannot be loaded, or the device is full.
        Exit: a turn failed, and standard input is not a terminal; the exit status is 1.
    """
    _require_chat_options(options, files or [], recall)
    settings = options.settings()
    read, warnings = text_files.read_with_notices(files) if files else ([], [])

    announce_model(options.model)
    policy = _policy_of(options, recall)  # imports torch, after the checks above

    from snapkv_app.cli.changes import ask_command, explained_length
    from snapkv_app.cli.loading import load_model, say_if_demo
    from snapkv_app.cli.policy import usual_bits
    from snapkv_app.cli.sources import protection_of
    from snapkv_app.conversation import Conversation

    ways: dict[str, Any] = {"recall": recall, "prefill": options.reading}
    loaded = load_model(options)
    quantize, why_exact = usual_bits(policy, loaded.model, options)
    if why_exact:
        sys.stderr.write(f"bits: {why_exact}\n")
    say_if_demo(loaded)
    document, protection = text_files.join(read), protection_of(options, system=None)
    Chat(
        conversation=Conversation(
            loaded,
            policy,
            settings,
            document=document,
            protection=protection,
            quantize=quantize,
            **ways,
        ),
        model=loaded.model,
        load=lambda path: Conversation.load(path, loaded, settings, policy, **ways),
        inputs=[*(files or []), *([options.model] if options.model else [])],
        explained=lambda question: explained_length(
            loaded, question, settings, ask_command(files or [], question, options.model)
        ),
        as_json=options.json,
        with_layers=options.verbose,
        warnings=warnings,
    ).run()


def _require_chat_options(options: RunOptions, files: Sequence[str], recall: str | None) -> None:
    """Raise unless a conversation can use the options.

    Raises:
        InvalidArgumentError: an option is only for `ask`, the folder for recalled tokens cannot be
            created, or a document would be read from standard input.
    """
    for name in ("compare", "check", "answer_start", *DRAFTS):
        if getattr(options, name):
            raise wrong(
                name,
                "this option is only available for snapkv ask and not for snapkv chat",
                "Remove this option",
            )
    if recall is not None and not recall.strip():
        problem = "expected host, none or the name of a folder, but got an empty text"
        raise wrong("recall", problem, "Remove this option to use the default, host")
    if recall not in (None, "host", "none") and not Path(recall).absolute().parent.is_dir():
        problem = f"expected host, none or a folder in an existing folder, but got {recall!r}"
        raise wrong("recall", problem, f"Create the folder {str(Path(recall).parent)!r} first")
    if text_files.STDIN in files:
        problem = "a document cannot be -, because the questions are read from standard input"
        raise wrong("files", problem, "Use the name of a file instead of -")


def _policy_of(options: RunOptions, recall: str | None) -> "Policy":
    """Build the policy; with ``--recall none`` its budget must be a number of tokens.

    In that case, the default method has a budget of `DEFAULT_BUDGET` unless an option sets one, and
    each of its layers selects by itself.

    Raises:
        InvalidArgumentError: `recall` is "none", and the budget is auto, a share or bytes. Or the
            policy refuses a parameter.
    """
    from snapkv.policies import PrefixPolicy
    from snapkv_app.cli.policy import build_policy

    if recall != "none":
        return build_policy(options)
    is_auto = options.policy == DEFAULT and options.budget is None and options.keep_ratio is None
    if is_auto and not options.set_:
        options = replace(options, budget=DEFAULT_BUDGET)
    policy = build_policy(options, alone=True)
    if isinstance(policy, PrefixPolicy) and not isinstance(policy.budget, int):
        kind = "keep_ratio" if policy.budget is None else next(iter(policy.describe()["budget"]))
        got = options.budget if isinstance(options.budget, str) else kind
        raise wrong(
            "budget",
            f"--recall none needs a budget in tokens, but got {got}",
            f"For example, use --budget {DEFAULT_BUDGET}, or remove --recall none",
        )
    return policy


@dataclass(kw_only=True)
class Chat:
    """A conversation on the command line, which answers each line or runs it as a command."""

    conversation: "Conversation"
    model: Any
    load: Callable[[str], "Conversation"]  # loads a saved conversation from a path
    inputs: Sequence[str]  # files and folders that were read, never overwritten by /save
    explained: Callable[[str], AbstractContextManager[None]]  # adds a remedy to errors
    as_json: bool
    with_layers: bool
    warnings: list[str]
    has_failed: bool = False
    saved: set[str] = field(default_factory=set)  # real paths that this conversation was saved to

    def run(self) -> None:
        """Read lines until the input ends or /quit is read, and answer each or run its command.

        An error of this package is printed on standard error and ends only its turn.

        Raises:
            OutOfMemoryError: the device is full.
            Exit: a turn failed, and standard input is not a terminal; the exit status is 1.
        """
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are not UTF-8
        while (line := self._next_line()) not in ("", "/quit"):
            try:
                self._run_command(line) if line.startswith("/") else self._answer(line)
            except OutOfMemoryError:
                raise
            except SnapKVError as error:
                self.has_failed = True
                self._note(f"snapkv: error: {error}")
        if self.has_failed and not sys.stdin.isatty():
            raise typer.Exit(FAILED)

    def _next_line(self) -> str:
        """Return the next line that is not blank, without whitespace around it.

        Empty at the end of the input. On a terminal, a prompt is printed before each line.
        """
        while True:
            if sys.stdin.isatty():
                sys.stderr.write("> ")
                sys.stderr.flush()
            line = sys.stdin.readline()
            if line.strip() or not line:
                return line.strip()

    def _run_command(self, line: str) -> None:
        """Run the command in a line; an unknown one is reported on standard error.

        Raises:
            SnapKVError: the command fails.
        """
        commands = {
            "/stats": self._stats,
            "/drop": self._drop,
            "/save": self._save,
            "/load": self._load,
            "/help": self._help,
        }
        name, _, argument = line.partition(" ")
        if name not in commands:
            known = [*commands, "/quit"]
            # A mistyped command is no failure of a turn, so the exit status stays 0.
            problem = f"expected one of {', '.join(known)}, but got {name!r}"
            remedy = nearest(name, known, "Type /help to see a list of all commands")
            self._note(f"snapkv: {wrong('command', problem, remedy)}")
            return
        commands[name](argument.strip())

    def _answer(self, question: str) -> None:
        """Answer a question, and print the answer while it is generated, or as one JSON object.

        Raises:
            SnapKVError: the question cannot be answered, see `Conversation.ask`.
        """
        from snapkv_app.cli.loading import reading_progress  # imports torch
        from snapkv_app.cli.session import answer_record

        with self.explained(question), reading_progress(self.model, "chat") as bar:
            on_text = None if self.as_json else bar.before(write)
            answer = self.conversation.ask(question, on_text=on_text)
        if not self.as_json:
            write("\n")
            return
        record = answer_record(answer, with_layers=self.with_layers)
        answered = {"question": question, **record, "warnings": self.warnings}
        write_json(answered, indent=None)

    def _stats(self, _: str) -> None:
        cache = self.conversation.report()
        if self.as_json:
            from snapkv_app.cli.session import without  # imports torch

            stats = cache if self.with_layers else without(cache, "layers")
            write_json({"stats": stats}, indent=None)
            return
        write(
            f"{cache.seen_tokens:,} tokens seen, {cache.chosen_tokens:,.0f} kept\n"
            f"device: {format_bytes(cache.held_bytes)} of {format_bytes(cache.full_bytes)}\n"
            f"host: {format_bytes(cache.host_bytes)}\n"
        )

    def _drop(self, what: str) -> None:
        """Drop a part of the conversation, and print how many tokens and bytes that has freed.

        Raises:
            InvalidArgumentError: nothing can be dropped, see `Conversation.drop`.
        """
        freed = self.conversation.drop(what)
        if self.as_json:
            write_json({"dropped": what, **freed}, indent=None)
            return
        write(
            f"{freed['tokens']:,} tokens dropped, {format_bytes(freed['device_bytes'])} free on "
            f"the device, {format_bytes(freed['host_bytes'])} on the host\n"
        )

    def _save(self, argument: str) -> None:
        """Save the conversation to a file.

        Args:
            argument: the path. After "--force", an existing file is replaced; without it, only one
                to which this conversation was saved before.

        Raises:
            InvalidArgumentError: the path is not valid or may not be replaced, or no question has
                been asked yet.
            CacheFileError: the file cannot be written.
            OutputError: the existing file cannot be replaced.
        """
        first, _, rest = argument.partition(" ")
        is_forced = first == "--force"
        path = _require_name(rest.strip() if is_forced else argument)
        force = (
            is_forced or os.path.realpath(path) in self.saved
        )  # this conversation was saved there
        require_output("save", path, Output(), inputs=self.inputs, force=force)
        if is_forced:  # the existing file may be of any kind
            with replacing(Path(path)) as partial:
                self.conversation.save(partial)
        else:
            self.conversation.save(path)
        self.saved.add(os.path.realpath(path))
        self._note(f"saved {path}")

    def _load(self, path: str) -> None:
        """Continue the conversation that was saved at `path`.

        Raises:
            InvalidArgumentError: there is no file at `path`.
            CacheFileError: the file is damaged, or contains no conversation.
            CacheMismatchError: the file belongs to another model or policy, or was saved with
                recall although recall is "none" now, or the other way round.
        """
        if not os.path.isfile(_require_name(path)):
            got = "a folder" if os.path.isdir(path) else "no file"
            problem = f"expected a saved conversation, but found {got} at {path!r}"
            raise wrong("path", problem, "Use /save FILE to save a conversation")
        self.conversation, self.warnings = self.load(path), []
        self.saved.clear()
        self._note(
            f"loaded {path}: {self.conversation.tokens:,} tokens; the conversation continues with "
            "its own documents and budget, not with those of the command line"
        )

    def _help(self, _: str) -> None:
        self._note(
            "/stats  /drop thinking|document|TURN  /save [--force] FILE  /load FILE  /quit; "
            "anything else is a question"
        )

    def _note(self, text: str) -> None:
        """Print a line on standard error, since standard output is for answers."""
        sys.stderr.write(without_controls(" ".join(text.split())) + "\n")
        sys.stderr.flush()


def _require_name(path: str) -> str:
    """Return `path` if it can name a file.

    Raises:
        InvalidArgumentError: `path` is empty or contains a NUL byte.
    """
    if not path or "\0" in path:
        got = repr(path) if path else "none"
        raise wrong(
            "path",
            f"expected the name of a file, but got {got}",
            "Write the name of the file after the command",
        )
    return path
