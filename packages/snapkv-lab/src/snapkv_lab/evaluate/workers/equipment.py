"""What a worker has, wherever it is."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapkv_lab.evaluate.asking import Answerer


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """What a worker needs before the first question.

    Attributes:
        load: arguments of `snapkv.app.models.load`, `device` left out.
        threads: of torch in a worker, where it runs on the CPU; None for its share of the machine.
    """

    load: Mapping[str, Any]
    threads: int | None = None

    def answerer(self, device: str) -> Answerer:
        """Load the model there, quietly: the process that asks has said what there is to say."""
        import torch
        import transformers

        from snapkv.app.models import load

        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()  # its lock is left behind by a killed process
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return Answerer(loaded=load(**self.load, device=device))
