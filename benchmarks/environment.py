"""Where and with what a number was measured: part of every row."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

import snapkv

_ROOT = Path(__file__).parent.parent


def describe_environment() -> dict[str, Any]:
    """Commit, versions, device and threads."""
    return {
        "commit": _git("rev-parse", "--short=10", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--", "src", "benchmarks").splitlines()),
        "snapkv": snapkv.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
    }


def _git(*arguments: str) -> str:
    """Output of a git command; empty outside a checkout."""
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True)
    return done.stdout.rstrip()


def _processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
