"""A selection like StreamingLLM's: the first tokens and the last ones.

Also the shortest example of a policy: a subclass of `PrefixPolicy` gives scores, and the parent
checks the parameters, keeps the sinks and the window, copes with padding and selects.
"""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapkv.policies import PrefixPolicy, PromptLayer


@dataclass(frozen=True)
class SinksAndRecent(PrefixPolicy):
    """Keeps the first `sink_tokens` of the prompt and fills the budget with the most recent.

    Only the selection is StreamingLLM's: positions stay true here, where StreamingLLM counts them
    inside its cache, and the tokens generated after the prompt are all kept.
    """

    name: ClassVar[str] = "sinks_and_recent"

    _: KW_ONLY
    sink_tokens: int = 4

    @property
    def query_tokens(self) -> int:
        """None: nothing is scored by attention."""
        return 0

    def score(self, layer: PromptLayer) -> Tensor:
        """Later is better: (B, Hkv, P) float32."""
        batch, heads, prompt_tokens, _ = layer.keys.shape
        columns = torch.arange(prompt_tokens - self.window_size, device=layer.keys.device)
        return columns.float().expand(batch, heads, -1)
