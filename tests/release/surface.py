"""What a release has promised: every public name with its parameters, every command's options.

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
    """What there is now, by "python" and "commands"."""
    packages = (snapkv, snapkv_app)
    names = {name: _parameters(getattr(one, name)) for one in packages for name in one.__all__}
    return {
        "python": names,
        "commands": dict(_options("snapkv", typer.main.get_command(program()))),
    }


def missing(promised: dict[str, dict[str, list[str]]], here: dict[str, dict[str, list[str]]]):
    """What was promised and is gone, one line each."""
    for kind, names in promised.items():
        for name, parts in names.items():
            if name not in here[kind]:
                yield name
            else:
                yield from (f"{name} {part}" for part in parts if part not in here[kind][name])


def _parameters(thing: Any) -> list[str]:
    """Of what users call; errors and reports are made by the package alone."""
    if isinstance(thing, type) and issubclass(thing, (Exception, dict)):
        return []
    return list(inspect.signature(thing).parameters)


def _options(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    """Of a command and those below it; aliases of an option are names of their own."""
    options = (option for option in command.params for option in option.opts)
    yield name, sorted(option for option in options if option.startswith("-"))
    for below, part in getattr(command, "commands", {}).items():
        yield from _options(f"{name} {below}", part)


if __name__ == "__main__":
    RECORD.write_text(json.dumps(surface(), indent=1) + "\n", "utf-8")
