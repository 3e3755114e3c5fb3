"""Where and with what a number was measured: part of every row."""

import subprocess
from pathlib import Path
from typing import Any

import torch

from snapkv_lab.measure.environment import describe

_ROOT = Path(__file__).parents[5]


def describe_environment(device: torch.device | None = None) -> dict[str, Any]:
    """Commit, versions, device and threads."""
    return {
        "commit": _git("rev-parse", "--short=10", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--", "packages").splitlines()),
        **describe(device or torch.device("cpu")),
    }


def _git(*arguments: str) -> str:
    """Output of a git command; empty outside a checkout."""
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True)
    return done.stdout.rstrip()
