"""The command line: one file per command."""

from snapkv.cli.app import main

__all__ = ["main"]
