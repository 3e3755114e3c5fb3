"""Functions of an installed Python package that their own docstrings describe.

The package is read, not imported. Nested functions are left out, and so are those with decorators.
"""

import ast
import functools
import random
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from snapkv.errors import InvalidArgumentError
from snapkv.packages import find_package_file

STANDARD_LIBRARY = "stdlib"
"""The name under which the modules that come with Python are one package."""

_NO_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
"""Folders that hold other packages, tests or another program."""

_MOST_FILE_BYTES = 200_000
_DESCRIPTION_WORDS = range(6, 41)
_CODE_LINES = range(4, 31)
_MOST_CODE_CHARACTERS = 1500


@dataclass(frozen=True, kw_only=True)
class DescribedFunction:
    """A function, and what it does in words.

    Attributes:
        name: as it is defined.
        code: the whole function as `ast.unparse` writes it, without its docstring, comments and
            blank lines.
        description: the first paragraph of its docstring, on one line; it does not say the name.
        file: where it is defined, below the package's folder.
    """

    name: str
    code: str
    description: str
    file: str


def drawn(package: str, draw: random.Random) -> Iterator[DescribedFunction]:
    """The functions of a package, file by file, the files in a drawn order.

    No two of them share a name, a description or their code.

    Args:
        package: as it is imported, or `STANDARD_LIBRARY`.
        draw: of the order.

    Raises:
        InvalidArgumentError: there is no such package.
    """
    folder, known = _folder(package), set[str]()
    files = list(_files(folder))
    draw.shuffle(files)
    for file in files:
        for found in _functions(folder, file):
            own = {found.name, found.description, found.code}
            if not own & known:
                known |= own
                yield found


def _folder(package: str) -> Path:
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_path("stdlib"))
    found = find_package_file(package) if package.isidentifier() else None
    if found is None:
        raise InvalidArgumentError(
            f"package: expected {STANDARD_LIBRARY}, or the name by which an installed package of "
            f"several files is imported, got {package!r}; install it, or name another"
        )
    return found


@functools.cache
def _files(folder: Path) -> tuple[str, ...]:
    """The files of a package that are short enough, in the order of their names."""
    files = (path for path in folder.rglob("*.py") if path.is_file())
    found = (path for path in files if path.stat().st_size <= _MOST_FILE_BYTES)
    names = (path.relative_to(folder) for path in found)
    return tuple(sorted(name.as_posix() for name in names if not _NO_SOURCE & {*name.parts}))


@functools.cache
def _functions(folder: Path, file: str) -> tuple[DescribedFunction, ...]:
    """What a file defines; nothing where it cannot be read, or is not Python of this version."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse((folder / file).read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):  # deep nesting, too
        return ()
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    scopes += (node for node in tree.body if isinstance(node, ast.ClassDef))
    made = (_described(node, file) for scope in scopes for node in scope.body)
    return tuple(found for found in made if found is not None)


def _described(node: ast.stmt, file: str) -> DescribedFunction | None:
    """A function with a docstring that can be asked for; None for anything else."""
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    paragraph, _, _ = (ast.get_docstring(node) or "").partition("\n\n")
    words = paragraph.split()
    if len(words) not in _DESCRIPTION_WORDS or node.name.lower() in paragraph.lower():
        return None
    del node.body[0]
    lines = [line for line in ast.unparse(node).split("\n") if line.strip()]
    code = "\n".join(lines)
    if len(lines) not in _CODE_LINES or len(code) > _MOST_CODE_CHARACTERS:
        return None
    return DescribedFunction(name=node.name, code=code, description=" ".join(words), file=file)
