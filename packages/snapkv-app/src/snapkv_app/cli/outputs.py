"""Output paths of commands: existing files need --force, and input files are never overwritten.

The annotation of an option marks it as an output. Outputs are checked when the command is called,
before anything slow.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from snapkv.cache.saving.writing import foreign_files, is_stream
from snapkv.errors import InvalidArgumentError
from snapkv_app.cli import panels


@dataclass(frozen=True, kw_only=True)
class Output:
    """Marks an option that names a file, or a folder for files, written at the end.

    Attributes:
        files: names in the folder; empty if the option names one file.
        beside: suffixes of its stem that give further files, such as "-budgets".
    """

    is_added_to: ClassVar[bool] = False
    """Whether a command continues what is there, which `--force` then must not delete."""

    files: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def targets(self, path: Path) -> list[Path]:
        """The files that are written."""
        if self.files:
            return [path / name for name in self.files]
        endings = self.beside if path.name else ()  # "." is refused as a folder below
        return [path, *(path.with_stem(f"{path.stem}{ending}") for ending in endings)]

    def is_own(self, path: Path) -> bool:
        """Whether the existing path was written by this option and can be continued."""
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            return self._is_own(path)
        return False

    def _is_own(self, path: Path) -> bool:
        return False

    def strangers(self, path: Path) -> list[str]:
        """Other files that are there, because of which nothing may be written."""
        return []


@dataclass(frozen=True, kw_only=True)
class RunFolder(Output):
    """Marks an option that names the folder of a run; the same run is continued there.

    Attributes:
        key: of the first of its files, which identifies the run.
    """

    is_added_to: ClassVar[bool] = True

    key: str

    def _is_own(self, path: Path) -> bool:
        return self.key in json.loads((path / self.files[0]).read_bytes())

    def strangers(self, path: Path) -> list[str]:
        """Existing files that do not belong to a run."""
        with contextlib.suppress(OSError):  # the caller says which folder to choose
            return [] if self.is_own(path) else foreign_files(path, self.files)
        return []


@dataclass(frozen=True, kw_only=True)
class RowsFile(Output):
    """Marks an option that names a file to which rows are added, JSON objects that have `key`."""

    is_added_to: ClassVar[bool] = True

    key: str

    def _is_own(self, path: Path) -> bool:
        with path.open("rb") as file:
            first = file.readline()
        return not first or self.key in json.loads(first)


RESULTS = RunFolder(files=("run.json", "samples.jsonl", "summary.jsonl"), key="snapkv")
"""The folder of an evaluation or a study."""


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """Options of every command that writes a file at its end."""

    force: Annotated[bool, panels.output("--force", help="Replace files that are there")] = False


def results_folder(given: str | None, kind: str, model: str, fingerprint: str) -> Path:
    """The folder for results: the given one, or one named after the run."""
    if given is not None:
        return Path(given)
    name = re.sub(r"[^\w.-]+", "-", model).strip("-")
    return Path("snapkv-results") / f"{kind}-{name}-{fingerprint}"


def require_outputs(marked: Mapping[str, Output], given: Mapping[str, Any]) -> None:
    """Refuse to overwrite files that the command did not write."""
    inputs = [text for name in given.keys() - marked.keys() for text in _texts(given[name])]
    taken: dict[str, str] = {}
    for name, output in marked.items():
        if (text := given.get(name)) is None:
            continue
        require_output(name, text, output, inputs=inputs, force=bool(given.get("force")))
        for target in output.targets(Path(text)):
            real = os.path.realpath(target)
            if taken.setdefault(real, name) != name:
                raise InvalidArgumentError(
                    f"{name}: expected another file than that of {taken[real]}, got {text!r} for "
                    "both; choose another name"
                )


def require_output(
    name: str, text: str, output: Output, *, inputs: Iterable[str], force: bool
) -> None:
    """Refuse an output that exists and is not the command's, or that cannot be written.

    Args:
        name: of the option.
        text: its value.
        output: what is written there.
        inputs: texts that may be paths of input files.
        force: whether existing files may be replaced; input files never are.
    """
    if not text.strip():
        raise InvalidArgumentError(f"{name}: expected a name, got an empty one; pass a name")
    path = Path(text)
    targets = [target for target in output.targets(path) if not is_stream(target)]
    if targets:
        _require_place(name, path, output)
    for target in targets:
        if _is_there(name, target) and not output.is_own(path):
            _require_replaceable(name, target, output, inputs, force)
    if found := output.strangers(path):
        raise InvalidArgumentError(
            f"{name}: expected a new or empty folder, or that of the same run, got {text!r} with "
            f"{found[0]!r} in it; choose another folder"
        )


def _require_place(name: str, path: Path, output: Output) -> None:
    """Refuse a folder that is missing and is not created, or that cannot be written to."""
    folder = path if output.files else path.parent
    if output.files or output.is_added_to:  # such folders are created
        while not os.path.lexists(folder):
            folder = folder.parent
    elif not folder.is_dir():
        raise InvalidArgumentError(
            f"{name}: expected a file in an existing folder, got {str(path)!r}; make "
            f"{str(folder)!r} first, or choose another place"
        )
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InvalidArgumentError(
            f"{name}: expected a folder that can be written, got {str(folder)!r}: "
            f"{error.strerror or error}; choose another place"
        ) from error


def _is_there(name: str, target: Path) -> bool:
    """Whether any file has that name, even a broken link."""
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise InvalidArgumentError(
            f"{name}: expected a valid file name, got {str(target)!r}: "
            f"{error.strerror or error}; choose another name"
        ) from error
    if target.is_dir():
        raise InvalidArgumentError(
            f"{name}: expected the name of a file, got the folder {str(target)!r}; name a file"
        )
    return True


def _require_replaceable(
    name: str, target: Path, output: Output, inputs: Iterable[str], force: bool
) -> None:
    if _is_read(target, inputs):
        raise InvalidArgumentError(
            f"{name}: expected a file that is not read, got {str(target)!r}, which is one of the "
            "inputs; choose another name"
        )
    if output.is_added_to or not force:
        forced = "" if output.is_added_to else ", or pass --force to replace it"
        raise InvalidArgumentError(
            f"{name}: expected a new name, got {str(target)!r}, which is there already; choose "
            f"another name{forced}"
        )


def _texts(value: Any) -> Iterator[str]:
    """The texts in the value of an option, which may be repeated or contain commas."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str):
            yield from filter(None, {each, *each.split(",")})


def _is_read(target: Path, inputs: Iterable[str]) -> bool:
    """Whether a file is one of the inputs, including files in folders and standard input.

    Device and inode are compared, so that links are recognised.
    """
    with contextlib.suppress(OSError):  # a broken link, or the input is closed
        status = target.stat()
        for text in inputs:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # not a path
                path = Path(text).expanduser()
                files = filter(os.path.exists, [path, *path.rglob("*")])
                if any(os.path.samestat(status, os.stat(file)) for file in files):
                    return True
        return os.path.samestat(status, os.fstat(0))
    return False
