"""What a slow step does, said on a terminal before torch is imported, which takes seconds."""

import sys

from rich.console import Console


def announce(doing: str) -> None:
    """Say it in a line on standard error; not where that is read by a program."""
    if Console(stderr=True).is_terminal:
        sys.stderr.write(f"snapkv: {doing}\n")


def announce_model(name: str | None) -> None:
    announce(f"loading {name or 'the demo model'}")
