"""A method of your own, evaluated beside others: how often is a hidden number found?"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from snapkv import FullCache, default_policy
from snapkv.policies import PrefixPolicy, PromptLayer
from snapkv_app.models import load
from snapkv_lab.evaluate.runner import Method, Run
from snapkv_lab.evaluate.tasks import Needle


@dataclass(frozen=True)
class LongestValues(PrefixPolicy):
    """Keeps the positions whose values are longest."""

    name: ClassVar[str] = "longest-values"
    query_tokens: ClassVar[int] = 0

    def score(self, layer: PromptLayer) -> Tensor:
        """Norm of every value before the window: (B, Hkv, P) float32."""
        return layer.values[:, :, : -self.window_size].float().norm(dim=-1)


POLICIES = {"full": FullCache(), "default": default_policy(128), "mine": LongestValues(128)}

run = Run(
    loaded=load("demo"),  # or "Qwen/Qwen3-4B", with the task's cloze=False and without template
    task=Needle(lengths=(512,), depths=3, cloze=True),
    methods=[Method(label=name, policy=policy) for name, policy in POLICIES.items()],
    template="none",
)
with tempfile.TemporaryDirectory() as folder:  # a folder that stays can be continued
    for row in run.evaluate(Path(folder)).rows:
        print(f"{row['method']:<8} depth {row['cell']['depth']:<4} score {row['score']:.2f}")
