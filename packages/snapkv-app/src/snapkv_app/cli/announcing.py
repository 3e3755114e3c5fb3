"""Announce slow steps on standard error, before torch is imported."""

import sys

from rich.console import Console


def announce(step: str) -> None:
    """Print one line about a slow step on standard error, if standard error is a terminal."""
    if Console(stderr=True).is_terminal:
        sys.stderr.write(f"snapkv: {step}\n")


def announce_model(name: str | None) -> None:
    """Announce that a model is being loaded; None stands for the demo model."""
    announce(f"loading {name or 'the demo model'}")
