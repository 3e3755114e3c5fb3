"""JSON rows on disk, and where and with what they were measured."""

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from snapkv_lab.measure.environment import describe

ROOT = Path(__file__).parents[5]
CHECKOUT = (ROOT / "packages" / "snapkv-lab").is_dir()
RESULTS = ROOT / "docs" / "results" if CHECKOUT else Path("snapkv-results")
"""Where rows and pages go; of an installed package, a folder below the current one."""

Row = dict[str, Any]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file by these rows, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows that belong together, at once, so that none of them is left half written."""
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1 << 20, encoding="utf-8") as file:
        file.write(text)


def of(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def describe_environment(device: torch.device | None = None) -> Row:
    return {
        "commit": git("rev-parse", "--short=10", "HEAD"),
        "changed_files": len(git("status", "--porcelain", "--", "packages").splitlines()),
        **describe(device or torch.device("cpu")),
    }


def git(*arguments: str) -> str:
    """Output of a git command; empty outside a checkout."""
    if not CHECKOUT or shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.rstrip()


def environment_line(rows: Iterable[Row]) -> str:
    """What the rows say about model, software and machine, each with its commits."""
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
