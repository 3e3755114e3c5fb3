"""`snapkv library` manages folders of read documents, which `snapkv ask --library` uses."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from snapkv.errors import wrong
from snapkv.validation import format_bytes, require_choice, without_controls
from snapkv_app.cli import panels
from snapkv_app.cli.amounts import byte_count
from snapkv_app.cli.announcing import announce_model
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.grid import Grid, give
from snapkv_app.cli.options import PolicyOptions
from snapkv_app.cli.outputs import Output
from snapkv_app.cli.standard_output import FAILED, write, write_json

if TYPE_CHECKING:
    from snapkv_app.library.about import About
    from snapkv_app.library.library import Library, Outcome
    from snapkv_app.library.records import Record

EXAMPLES = {
    "library": ("snapkv library add contract.pdf notes.txt", "snapkv library list snapkv-library"),
    "library add": (
        "snapkv library add contract.pdf notes.txt",
        "snapkv library add contract.pdf --policy across-layers --set policy=kvzip",
    ),
    "library list": ("snapkv library list snapkv-library",),
    "library check": ("snapkv library check snapkv-library",),
    "library limit": ("snapkv library limit snapkv-library 20GiB",),
    "library remove": ("snapkv library remove snapkv-library contract.pdf",),
}

_BITS = ("int4", "K8V4", "int8", "none")
_METHOD_OF_LIBRARY = ""
_END_VOTES = (
    "warning: policy: {} keeps the tokens that the end of each document attends to, which may not "
    "be the tokens that questions need, and the evicted tokens are lost. Leave --policy out, or "
    "pass --policy across-layers --set policy=kvzip."
)

Place = Annotated[str, typer.Argument(metavar="LIBRARY", help="The folder of the library")]


@dataclass(frozen=True, kw_only=True)
class LibraryFolder(Output):
    """A mark for an option that names the folder of a library, to which documents are added."""

    is_added_to: ClassVar[bool] = True

    def _is_own(self, path: Path) -> bool:  # the library checks its version
        found: str = json.loads((path / self.files[0]).read_bytes())["format"]
        return found.startswith("snapkv library ")


@dataclass(frozen=True, kw_only=True)
class AddOptions(PolicyOptions):
    """The options of `snapkv library add`."""

    to: Annotated[
        str,
        panels.output(help="Folder of the library, which is created if it is missing"),
        LibraryFolder(files=("library.json",)),
    ] = "snapkv-library"
    policy: Annotated[
        str,
        panels.policy(
            help="Method; `snapkv policies` lists them",
            show_default="the library's; full for a new one, which keeps everything",
        ),
    ] = _METHOD_OF_LIBRARY
    keep_ratio: Annotated[
        float | None,
        panels.policy(help="Instead of --budget, the fraction of a document to keep"),
    ] = None
    bits: Annotated[
        str | None,
        panels.policy(
            help="Store keys and values in int4, K8V4 or int8; none for the model's dtype",
            show_default="the library's; int4 for a new one",
        ),
    ] = None
    json: panels.AsJson = False

    def __post_init__(self) -> None:
        """Check the bits, and that parameters are given only together with a method.

        Raises:
            InvalidArgumentError: the bits are unknown, or there are parameters without a method.
        """
        super().__post_init__()
        if self.bits is not None:
            require_choice("bits", self.bits, _BITS)
        if self.policy == _METHOD_OF_LIBRARY and (self.has_parameters or self.seed is not None):
            raise wrong(
                "policy",
                "the parameters belong to a method, but no method was given",
                "For example, use --policy across-layers --set policy=kvzip",
            )


app = typer.Typer(
    name="library",
    help="Read documents once, then ask about them with `snapkv ask --library`.",
    no_args_is_help=True,
)


@app.command()
@with_options(AddOptions)
def add(sources: panels.Documents, *, options: AddOptions) -> None:
    """Read new and changed documents, and remove documents whose files were deleted.

    Raises:
        InvalidArgumentError: the method refuses a parameter.
        LibraryError: the folder is not a library, another process is changing it, or its documents
            were read with another model, method or bits.
        SnapKVError: the model cannot be loaded, or a file cannot be written.
        Exit: a document cannot be read, and the others are stored; the exit status is 1.
    """
    from snapkv_app import library_files
    from snapkv_app.library.library import Outcome

    library = open_folder(options.to)
    library.require_unlocked()
    found = library_files.find(sources, library)
    policy, notices = None, found.notices
    if found.texts or options.policy != _METHOD_OF_LIBRARY:
        announce_model(like(library, options).model)
    if options.policy != _METHOD_OF_LIBRARY:
        from snapkv.policies.base import ALL_QUERIES
        from snapkv_app.cli.policy import build_policy  # imports torch, after the checks above

        policy = build_policy(options)
        if not policy.needs_reconstruction_pass and 0 < policy.query_tokens < ALL_QUERIES:
            notices = [*notices, _END_VOTES.format(policy.name)]
    _print_errors(notices)
    outcomes = [
        Outcome(name=name, what="failed", reason=reason) for name, reason in found.failed.items()
    ]
    if found.texts:
        from snapkv_app.cli.loading import load_model, reading_progress  # imports torch

        loaded = load_model(like(library, options))
        with reading_progress(loaded.model, str(library.path)) as bar:
            outcomes += library.add(
                loaded.model,
                loaded.tokenizer,
                found.texts,
                policy,
                bits=options.bits,  # type: ignore[arg-type] # one of them, see `AddOptions`
                model_name=loaded.name,
                on_progress=bar.next,
            )
    if found.gone:
        gone = library.remove([record.where for record in found.gone])
        outcomes += [Outcome(name=record.name, what="dropped") for record in gone]
    record = {"library": str(library.path), "documents": [asdict(each) for each in outcomes]}
    give(
        record | {"warnings": notices},
        lambda: _outcomes_table(outcomes),
        as_json=options.json,
        place=f"library: {library.path}",
    )
    failed = [each for each in outcomes if each.what == "failed"]
    _print_errors([f"not read: {each.name}: {each.reason}" for each in failed])
    if failed:
        raise typer.Exit(FAILED)


@app.command(name="list")
def list_(library: Place, json: panels.AsJson = False) -> None:
    """List the documents of a library with their tokens, bytes, passages and source files."""
    found = open_folder(library)
    about, records = found.required(), found.documents
    rows = [
        {name: value for name, value in asdict(record).items() if name != "text"}
        for record in records
    ]
    shared = {name: getattr(about, name) for name in ("policy", "bits", "max_bytes")}
    give(
        {"library": library, "model": about.who} | shared | {"documents": rows},
        lambda: _documents_table(about, records),
        as_json=json,
    )


@app.command()
def check(library: Place, json: panels.AsJson = False) -> None:
    """Read all files of a library and name the damaged ones; exit with status 1 if any is."""
    found = open_folder(library, quiet=True)
    faults = found.verify()
    documents = len(found.documents)
    if json:
        rows = [{**asdict(fault), "path": str(fault.path)} for fault in faults]
        write_json({"library": library, "documents": documents, "damaged": rows})
    elif not faults:
        write(f"{documents:,} documents, all undamaged\n")
    for fault in () if json else faults:
        write(f"damaged: {fault.name} ({fault.path}): {fault.reason}\n")
    if faults:
        raise typer.Exit(FAILED)


@app.command()
def limit(
    library: Place,
    size: Annotated[
        str, typer.Argument(metavar="BYTES", help="Bytes such as 20GiB, or none for no limit")
    ],
    evict: Annotated[
        bool,
        typer.Option("--evict", help="Remove documents now if the library is larger than that"),
    ] = False,
    json: panels.AsJson = False,
) -> None:
    """Limit the bytes of keys and values. The least recently used documents are removed first."""
    before = f"snapkv library limit {library} "
    most_bytes = None if size.lower() == "none" else byte_count("size", size, before)
    gone = [entry.name for entry in open_folder(library).limit(most_bytes, evict=evict)]
    if json:
        write_json({"library": library, "max_bytes": most_bytes, "evicted": gone})
    else:
        write("".join(f"evicted: {name}\n" for name in gone))


@app.command()
def remove(
    library: Place,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Names of documents, or their source files")
    ],
    json: panels.AsJson = False,
) -> None:
    """Remove documents from the library, but not their source files."""
    gone = [record.name for record in open_folder(library).remove(names)]
    if json:
        write_json({"library": library, "removed": gone})
    else:
        write("".join(f"removed: {name}\n" for name in gone))


def open_folder(folder: str, *, quiet: bool = False) -> "Library":
    """Open the library in a folder, which may be missing or empty.

    Its warnings go to standard error, unless `quiet` is set.

    Raises:
        InvalidArgumentError: the name of the folder is empty or contains a NUL byte.
        LibraryError: the folder exists, but is not a library or cannot be read.
    """
    from snapkv_app.library.library import Library

    def notice(line: str) -> None:
        if not quiet:
            _print_errors([f"snapkv: warning: {line}"])

    return Library(folder, on_notice=notice)


def like(library: "Library", options: Any) -> Any:
    """Return a copy of the options, with the model and dtype of the library where none is given.

    The options themselves are returned if there is no library yet.
    """
    about = library.about
    if about is None:
        return options
    return replace(
        options,
        model=options.model or about.model_name,
        dtype=options.dtype or about.model["dtype"],
    )


def _print_errors(lines: list[str]) -> None:
    for line in lines:
        sys.stderr.write(f"{without_controls(line)}\n")


def _outcomes_table(outcomes: "Sequence[Outcome]") -> Grid:
    """Build a table with a row for each document that was added or removed, or failed."""
    rows = []
    for each in outcomes:
        is_stored = each.what not in ("failed", "dropped", "evicted")
        rows.append(
            (
                each.name,
                each.what,
                f"{each.tokens:,}" if is_stored else "-",
                format_bytes(each.bytes) if is_stored else "-",
                f"{each.seconds:.1f}" if each.seconds else "-",
            )
        )
    return Grid(headings=("document", "", "tokens", "on disk", "seconds"), rows=tuple(rows), left=2)


def _documents_table(about: "About", records: "Sequence[Record]") -> Grid:
    """Build a table with a row for each document of a library."""
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
    bits = "" if about.bits is None else f", in {about.codes}"
    limit = "" if about.max_bytes is None else f"; at most {format_bytes(about.max_bytes)}"
    return Grid(
        headings=("document", "tokens", "on disk", "passages", "from"),
        rows=tuple(rows),
        caption=f"read by {about.who}, method {about.policy_in_words}{bits}{limit}",
    )
