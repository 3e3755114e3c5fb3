"""What a worker has, wherever it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapkv.lab.evaluate.asking import Answerer
from snapkv.lab.evaluate.sample import Template
from snapkv.lab.evaluate.task import Task


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """What a worker needs before the first question.

    Attributes:
        load: arguments of `snapkv.app.models.load`, `device` left out.
        task: what scores the answers.
        template: how a sample becomes a prompt.
        reference_loss: whether records say the loss of the references.
        threads: of torch in a worker, where it runs on the CPU.
    """

    load: Mapping[str, Any]
    task: Task
    template: Template
    reference_loss: bool = False
    threads: int = 1

    def answerer(self, device: str) -> Answerer:
        """Load the model there."""
        import torch

        from snapkv.app.models import load

        torch.set_num_threads(self.threads)
        loaded = load(**self.load, device=device)
        return Answerer(
            loaded=loaded,
            task=self.task,
            template=self.template,
            reference_loss=self.reference_loss,
        )
