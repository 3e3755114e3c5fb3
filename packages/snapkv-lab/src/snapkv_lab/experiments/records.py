"""The folder of rows and pages, and descriptions of where rows were measured."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from snapkv_lab.measure.environment import describe_device
from snapkv_lab.rows import Row

ROOT = Path(__file__).parents[5]
CHECKOUT = (ROOT / "packages" / "snapkv-lab").is_dir()
RESULTS = ROOT / "docs" / "results" if CHECKOUT else Path("snapkv-results")
"""The folder of rows and pages. For an installed package it is in the current folder."""


def describe_environment(device: torch.device | None = None) -> Row:
    """Return a description of the software and the machine, with the commit.

    It has "commit", "changed_files" (how many files of the packages differ from the commit), and
    the fields of `describe_device`, by default for the CPU. Without a checkout, the commit is empty
    and no file counts as changed.
    """
    return {
        "commit": git("rev-parse", "--short=10", "HEAD"),
        "changed_files": len(git("status", "--porcelain", "--", "packages").splitlines()),
        **describe_device(device or torch.device("cpu")),
    }


def git(*arguments: str) -> str:
    """Return the output of a git command in the checkout, without white space at its end.

    The text is empty outside of a checkout or without git, and usually if the command fails, whose
    status is not checked.
    """
    if not CHECKOUT or shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.rstrip()


def environment_line(rows: Iterable[Row]) -> str:
    """Return a sentence about model, software and machine of the rows, with their commits.

    Rows without "environment" are ignored. Rows of several machines give several parts, separated
    by semicolons. There is no full stop at the end.
    """
    commits: dict[str, dict[str, None]] = {}
    for row in rows:
        if "environment" in row:
            commits.setdefault(_machine(row), {})[row["environment"].get("commit", "")] = None
    return "; ".join(
        f"{line}, commit{'s' * (len(own) > 1)} {', '.join(own)}" for line, own in commits.items()
    )


def _machine(row: Row) -> str:
    model, environment = row["model"], row["environment"]
    vllm = f", vLLM {environment['vllm']}" if environment.get("vllm") else ""
    return (
        f"Measured on {model['name']} ({model['dtype']}, {model['attn_implementation']}, "
        f"{model['device']}), {environment['processor']}, {environment['threads']} threads, "
        f"torch {environment['torch']}, transformers {environment['transformers']}{vllm}"
    )
