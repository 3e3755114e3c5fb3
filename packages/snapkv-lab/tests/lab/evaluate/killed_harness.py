"""A run of lm-eval's tasks in a process of its own that a test kills."""

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from snapkv.app.models import load
from snapkv_lab.evaluate.harness import HarnessRun
from tests.lab.evaluate.tiny import METHODS


def run(folder: Path, output: str) -> None:
    """Two tasks whose files, as the model, are in the folder."""
    HarnessRun(
        loaded=load(str(folder / "model")),
        tasks=("local_gate", "local_choice"),
        methods=METHODS,
        include_path=folder,
    ).into(folder / output)


def _alone(folder: Path, output: str) -> None:
    torch.set_num_threads(1)
    run(folder, output)


def started(folder: Path, output: str) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_alone, args=(folder, output))
    process.start()
    return process
