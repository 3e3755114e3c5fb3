"""A run in a process of its own that a test kills; imported once, before the processes fork."""

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - here once, not in every process

from snapkv.app.models import load
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.tasks import Needle
from tests.lab.evaluate.tiny import METHODS

TASK = Needle(lengths=(300, 360), depths=4, digits=3, cloze=True)


def run(model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    questions = ("visible", "hidden")
    Run(loaded=load(str(model)), task=TASK, methods=METHODS, questions=questions).into(folder)


def started(model: Path, folder: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=run, args=(model, folder))
    process.start()
    return process
