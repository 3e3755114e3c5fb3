"""Check the output paths of commands, so that no file is overwritten by mistake.

An existing file is replaced only with --force, and an input file never. A mark in the annotation of
an option says that it names an output. Outputs are checked before the command does anything slow.
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
from snapkv.errors import wrong
from snapkv_app.cli import panels


@dataclass(frozen=True, kw_only=True)
class Output:
    """A mark for an option that names a file, or a folder for files, to be written.

    Attributes:
        files: the names of the files in the folder; empty if the option names one file.
        beside: the suffixes of the stem of the file that give the names of further files, such as
            "-budgets".
    """

    is_added_to: ClassVar[bool] = False
    """Whether a command adds to existing files, which `--force` must not delete then."""

    files: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def targets(self, path: Path) -> list[Path]:
        """Return the files that a command writes for the value `path` of the option.

        They are the files in the folder `path`, or `path` itself and then the files beside it.
        """
        if self.files:
            return [path / name for name in self.files]
        endings = self.beside if path.name else ()  # the folder "." is refused later
        return [path, *(path.with_stem(f"{path.stem}{ending}") for ending in endings)]

    def is_own(self, path: Path) -> bool:
        """Return whether an existing path was written for this option, and can be added to.

        False if it cannot be read, and always for a file that a command replaces.
        """
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            return self._is_own(path)
        return False

    def _is_own(self, path: Path) -> bool:
        return False

    def strangers(self, path: Path) -> list[str]:
        """Return the names of files in the folder `path` that forbid writing to it.

        The list is empty for this class. A subclass may know foreign files.
        """
        return []


@dataclass(frozen=True, kw_only=True)
class RunFolder(Output):
    """A mark for an option that names the folder of a run, in which that run can be continued.

    Attributes:
        key: a key of the JSON object in the first file, by which such a folder is recognised.
    """

    is_added_to: ClassVar[bool] = True

    key: str

    def _is_own(self, path: Path) -> bool:
        return self.key in json.loads((path / self.files[0]).read_bytes())

    def strangers(self, path: Path) -> list[str]:
        """Return the names of files in the folder that do not belong to a run, sorted.

        Empty if the folder is that of a run, is missing or cannot be read.
        """
        with contextlib.suppress(OSError):  # the folder is missing or cannot be read
            return [] if self.is_own(path) else foreign_files(path, self.files)
        return []


@dataclass(frozen=True, kw_only=True)
class RowsFile(Output):
    """A mark for an option that names a file to which rows are added.

    Attributes:
        key: a key of the JSON object in each row, by which such a file is recognised.
    """

    is_added_to: ClassVar[bool] = True

    key: str

    def _is_own(self, path: Path) -> bool:
        with path.open("rb") as file:
            first = file.readline()
        return not first or self.key in json.loads(first)


RESULTS = RunFolder(files=("run.json", "samples.jsonl", "summary.jsonl"), key="snapkv")
"""The mark of an option that names the folder of an evaluation or a study."""


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """The options of every command that writes a file at its end."""

    force: Annotated[bool, panels.output("--force", help="Replace existing files")] = False


def results_folder(given: str | None, kind: str, model: str, fingerprint: str) -> Path:
    """Return the folder for the results of a run; it is not created.

    Args:
        given: the folder that the user has named, or None.
        kind: the kind of the run, such as "eval".
        model: the name of the model.
        fingerprint: a digest of the settings of the run.

    Returns:
        `given`, or a folder such as ``snapkv-results/KIND-MODEL-FINGERPRINT``.
    """
    if given is not None:
        return Path(given)
    name = re.sub(r"[^\w.-]+", "-", model).strip("-")
    return Path("snapkv-results") / f"{kind}-{name}-{fingerprint}"


def require_outputs(marked: Mapping[str, Output], given: Mapping[str, Any]) -> None:
    """Raise unless a command may write all of its output files.

    Every text in the options that are not outputs counts as a possible input file.

    Args:
        marked: the marks of the options that name outputs. Options with the value None are left
            out.
        given: the values of all options, with "force" for ``--force``.

    Raises:
        InvalidArgumentError: two options name the same file, or `require_output` refuses one.
    """
    inputs = [text for name in given.keys() - marked.keys() for text in _texts(given[name])]
    taken: dict[str, str] = {}
    for name, output in marked.items():
        if (text := given.get(name)) is None:
            continue
        require_output(name, text, output, inputs=inputs, force=bool(given.get("force")))
        for target in output.targets(Path(text)):
            real = os.path.realpath(target)
            if taken.setdefault(real, name) != name:
                problem = f"this file is already used for {taken[real]}, but got {text!r} for both"
                raise wrong(name, problem, "Choose a different name")


def require_output(
    name: str, text: str, output: Output, *, inputs: Iterable[str], force: bool
) -> None:
    """Raise unless an output can be written without losing another file.

    Devices and pipes are always accepted. Nothing is written or created.

    Args:
        name: the name of the option.
        text: the value of the option.
        output: the mark of the option.
        inputs: texts that may be paths of input files or of folders with them.
        force: whether existing files may be replaced. Input files are never replaced, and neither
            are files to which a command adds.

    Raises:
        InvalidArgumentError: the name is empty or not valid, the folder is missing or cannot be
            written to or contains foreign files, or a file exists and may not be replaced.
    """
    if not text.strip():
        raise wrong(name, "expected the name of a file, but got an empty name", "Write a name")
    path = Path(text)
    targets = [target for target in output.targets(path) if not is_stream(target)]
    if targets:
        _require_place(name, path, output)
    for target in targets:
        if _exists(name, target) and not output.is_own(path):
            _require_replaceable(name, target, output, inputs, force)
    if found := output.strangers(path):
        problem = "expected a new or empty folder, or the folder of the same run, but got "
        raise wrong(
            name, f"{problem}{text!r}, which contains {found[0]!r}", "Choose a different folder"
        )


def _require_place(name: str, path: Path, output: Output) -> None:
    """Raise unless the folder of an output exists or will be created, and can be written to.

    Raises:
        InvalidArgumentError: the folder does not exist and will not be created, or the nearest
            existing folder cannot be written to.
    """
    folder = path if output.files else path.parent
    if output.files or output.is_added_to:  # the command creates the folder
        while not os.path.lexists(folder):
            folder = folder.parent
    elif not folder.is_dir():
        problem = f"the file {str(path)!r} cannot be created, because the folder does not exist"
        raise wrong(
            name, problem, f"Create the folder {str(folder)!r} first, or choose a different folder"
        )
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        problem = f"files cannot be written to the folder {str(folder)!r}"
        problem += f" ({error.strerror or error})"
        raise wrong(name, problem, "Choose a different folder") from error


def _exists(name: str, target: Path) -> bool:
    """Return whether a file with that name exists, even if it is a broken link.

    Raises:
        InvalidArgumentError: the name is not valid, or is that of a folder.
    """
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        problem = f"expected a valid file name, but got {str(target)!r} ({error.strerror or error})"
        raise wrong(name, problem, "Choose a different name") from error
    if target.is_dir():
        problem = f"expected the name of a file, but got the folder {str(target)!r}"
        raise wrong(name, problem, "Use the name of a file")
    return True


def _require_replaceable(
    name: str, target: Path, output: Output, inputs: Iterable[str], force: bool
) -> None:
    """Raise unless an existing file, which was not written for this option, may be replaced.

    Raises:
        InvalidArgumentError: the file is an input, `force` is False, or the command adds to files
            instead of replacing them.
    """
    if _is_input(target, inputs):
        problem = f"the file {str(target)!r} is also one of the input files"
        raise wrong(name, problem, "Choose a different name")
    if output.is_added_to or not force:
        forced = "" if output.is_added_to else ", or pass --force to replace it"
        problem = f"the file {str(target)!r} already exists"
        raise wrong(name, problem, f"Choose a different name{forced}")


def _texts(value: Any) -> Iterator[str]:
    """Yield each text in the value of an option, and the parts between its commas.

    The value may be a list or a tuple. What is not a text is left out.
    """
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str):
            yield from filter(None, {each, *each.split(",")})


def _is_input(target: Path, inputs: Iterable[str]) -> bool:
    """Return whether a file is an input, a file in a folder of inputs, or standard input.

    The device and the inode are compared, so that links are recognised.
    """
    with contextlib.suppress(OSError):  # a broken link, or standard input is closed
        status = target.stat()
        for text in inputs:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # not a path
                path = Path(text).expanduser()
                files = filter(os.path.exists, [path, *path.rglob("*")])
                if any(os.path.samestat(status, os.stat(file)) for file in files):
                    return True
        return os.path.samestat(status, os.fstat(0))
    return False
