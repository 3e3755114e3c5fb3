"""The public names with their parameters and the options of all commands, as last released.

python -m tests.release.surface    record it, when a release is made
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import snapkv
import snapkv_app
from snapkv_app.cli.app import program

RECORD = Path(__file__).parent / "surface.json"


def surface() -> dict[str, dict[str, list[str]]]:
    """Return the public names and commands that there are now.

    Returns:
        For "python", the parameters of each public name. For "commands", the options of each
        command, by its full name such as "snapkv ask".
    """
    packages = (snapkv, snapkv_app)
    names = {name: _parameters(getattr(one, name)) for one in packages for name in one.__all__}
    return {
        "python": names,
        "commands": dict(_options("snapkv", typer.main.get_command(program()))),
    }


def missing(promised: dict[str, dict[str, list[str]]], here: dict[str, dict[str, list[str]]]):
    """Yield a line for each name, parameter and option that was promised and is gone.

    Args:
        promised: an earlier output of `surface`.
        here: the output of `surface` now.
    """
    for kind, names in promised.items():
        for name, parts in names.items():
            if name not in here[kind]:
                yield name
            else:
                yield from (f"{name} {part}" for part in parts if part not in here[kind][name])


def _parameters(thing: Any) -> list[str]:
    """Return the names of the parameters of a function or class. Errors and reports have none,
    because only the package itself makes them.
    """
    if isinstance(thing, type) and issubclass(thing, (Exception, dict)):
        return []
    return list(inspect.signature(thing).parameters)


def _options(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the sorted options of a command, and those of the commands below it.
    Aliases of an option are names of their own.
    """
    options = (option for option in command.params for option in option.opts)
    yield name, sorted(option for option in options if option.startswith("-"))
    for below, part in getattr(command, "commands", {}).items():
        yield from _options(f"{name} {below}", part)


if __name__ == "__main__":
    RECORD.write_text(json.dumps(surface(), indent=1) + "\n", "utf-8")
