"""Messages on standard error: what a slow step does, said before torch is imported."""

import sys

from rich.console import Console


def announce(doing: str) -> None:
    """Print one line on standard error, if that is a terminal and not read by a program."""
    if Console(stderr=True).is_terminal:
        sys.stderr.write(f"snapkv: {doing}\n")


def announce_model(name: str | None) -> None:
    """Announce that a model is being loaded; None stands for the demo model."""
    announce(f"loading {name or 'the demo model'}")
