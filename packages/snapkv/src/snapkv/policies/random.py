"""A random selection, which any method must beat."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.states import PromptLayer
from snapkv.validation import require_int


@dataclass(frozen=True)
class Random(PrefixPolicy):
    """Keeps the window and random positions before it, which are different in each head.

    The draw depends on `seed`, the layer and the position counted from the end of the prompt, so
    the same prompt keeps the same positions on every run, alone or in a padded batch.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        seed: the seed of the draw.
        sink_tokens: first tokens that every head keeps, so that a method with sinks can be compared
            with chance.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range.
    """

    name: ClassVar[str] = "random"
    query_tokens: ClassVar[int] = 0

    _: KW_ONLY
    seed: int = 0
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("seed", self.seed, minimum=0, maximum=None)

    def score(self, layer: PromptLayer) -> Tensor:
        """Return a random number for each position, the same for every row.

        Returns:
            (B, Hkv, P) float32, uniform in [0, 1).
        """
        batch, prompt_tokens = layer.keys.shape[0], layer.keys.shape[2]
        seed = (self.seed * 100_003 + layer.layer_idx) % 2**63  # what a generator accepts
        generator = torch.Generator().manual_seed(seed)
        prefix_tokens = prompt_tokens - self.window_size
        shape = (prefix_tokens, layer.num_kv_heads)
        draws = torch.rand(shape, generator=generator, dtype=torch.float32)
        return draws.flip(0).T.expand(batch, -1, -1).to(layer.keys.device)
