"""The command line: one file per command."""

from snapkv.cli.entry import main

__all__ = ["main"]
