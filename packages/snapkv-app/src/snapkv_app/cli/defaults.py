"""Defaults of options that a user has set in the environment or in a file of the project."""

import os
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapkv.errors import wrong
from snapkv_app.cli.methods import accepted, methods

OPTIONS = ("model", "device", "dtype", "policy", "budget", "max_new_tokens")
"""Options whose default a user may set. None of them can make a command run code: the file may come
with a project of somebody else."""

FILE, PROJECT_FILE = "snapkv.toml", "pyproject.toml"

_MOST_BYTES = 1 << 20
"""Size of the largest file that is read for defaults."""


@dataclass(frozen=True)
class Default:
    """The default value of an option, as a user has set it in a file or an environment variable.

    Attributes:
        value: the text, as it would be typed.
        origin: the environment variable or the path of the file that sets it.
    """

    value: str
    origin: str


def read_defaults() -> dict[str, Default]:
    """Return the defaults that a user has set for options, by the name of the option.

    An environment variable comes before a file. The variables are ``SNAPKV_MODEL``,
    ``SNAPKV_BUDGET`` and so on. The file is the nearest ``snapkv.toml``, or ``pyproject.toml`` with
    a table ``[tool.snapkv]``, in the working directory or a folder above it.

    The values themselves are not checked. An empty variable counts as missing.

    Raises:
        InvalidArgumentError: the file cannot be read, is not TOML, or sets something else than
            `OPTIONS` to a text or a whole number.
    """
    found = _from_files()
    for name in OPTIONS:
        variable = f"SNAPKV_{name.upper()}"
        if value := os.environ.get(variable, "").strip():
            found[name] = Default(value, variable)
    return found


def defaults_for(command: str, options: Collection[str], typed: dict[str, Any]) -> dict[str, str]:
    """Return the texts to use for options of a command that were not typed.

    Args:
        command: the name of the command. `demo` has no defaults, since it shows one fixed example.
        options: the names of its options.
        typed: the options that were typed, with their values. A default budget is left out next to
            `keep_ratio`, and next to a method that takes no budget.

    Returns:
        The texts by option. It may contain options that were typed, for which it is not used.

    Raises:
        InvalidArgumentError: the file with defaults is not valid, see `read_defaults`.
    """
    if command == "demo":
        return {}
    found = {name: each.value for name, each in read_defaults().items() if name in options}
    method = typed.get("policy") or found.get("policy")
    has_no_budget = (
        isinstance(method, str) and method in methods() and "budget" not in accepted(method)
    )
    if "keep_ratio" in typed or has_no_budget:
        found.pop("budget", None)
    return found


def _from_files() -> dict[str, Default]:
    """Return the defaults that the nearest file sets, by option; empty without such a file.

    Raises:
        InvalidArgumentError: the file is not valid, see `read_defaults`.
    """
    try:
        here = Path.cwd()
    except OSError:
        return {}  # the working directory was deleted
    for folder in (here, *here.parents):
        for path in (folder / FILE, folder / PROJECT_FILE):
            # Unlike `Path.is_file`, this does not raise if a folder may not be looked into.
            if os.path.isfile(path) and (table := _table(path)) is not None:
                return dict(_default(path, name, value) for name, value in table.items())
    return {}


def _table(path: Path) -> dict[str, Any] | None:
    """Read the defaults in a file, which are not checked.

    None for a ``pyproject.toml`` without a table of them, and for one that cannot be read.

    Raises:
        InvalidArgumentError: ``snapkv.toml`` cannot be read, is larger than 1 MiB, or is not TOML.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"the file is larger than {_MOST_BYTES:,} bytes")
        read = tomllib.loads(path.read_text("utf-8"))
        return read if path.name == FILE else read.get("tool", {}).get("snapkv")
    except (OSError, ValueError, AttributeError) as error:
        if path.name == PROJECT_FILE:
            return None  # other tools report what is wrong with it
        raise wrong(
            str(path),
            f"the file is not a valid TOML file ({error})",
            "Correct the error, or delete the file",
        ) from error


def _default(path: Path, name: str, value: Any) -> tuple[str, Default]:
    """Check one entry of a file, and return the option and its default.

    Raises:
        InvalidArgumentError: the option has no default that a file can set, or the value is neither
            a text nor a whole number.
    """
    option = name.replace("-", "_")
    if option not in OPTIONS:
        raise wrong(
            str(path),
            f"the file sets {name!r}, but a default for this option cannot be set in a file",
            f"The options that can be set are {', '.join(OPTIONS)}",
        )
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong(
            str(path),
            f"the value of {name} must be a text or a whole number, but got {value!r}",
            "Correct the value",
        )
    return option, Default(str(value), str(path))
