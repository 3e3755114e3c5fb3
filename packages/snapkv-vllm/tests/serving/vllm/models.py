"""Small random models, in which what is kept decides the answers, and what the library answers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from snapkv import CompressedCache
from snapkv.policies import Policy
from snapkv_app.models import load
from tests.families import random_ids, tiny_config


def ids_of(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of random tokens."""
    return random_ids(1, tokens, seed=seed)[0].tolist()


def generated(model: Any, ids: list[int], cache: CompressedCache, tokens: int) -> list[int]:
    """The library's greedy answer to a prompt, of which the cache may have read the beginning."""
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    return output[0, len(ids) :].tolist()


class SmallModel:
    """A model in a folder for vLLM, and in this process for the library.

    Its heads are of a size that vLLM's kernels for CPUs take, and two processes can share them.

    Args:
        folder: where to save it.
        family: of `tests.families`.
        sizes: that differ from those of the family's tiny model.
    """

    kv_heads = 4

    def __init__(self, folder: Path, family: str = "llama", **sizes: int) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "num_key_value_heads": self.kv_heads, **sizes}
        self.model = AutoModelForCausalLM.from_config(tiny_config(family, **sizes)).float().eval()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if weight.ndim >= 2 and "embed" not in name:
                    weight.mul_(4.0)
        self.model.save_pretrained(folder)
        self.folder = str(folder)

    @property
    def compressed_layers(self) -> list[int]:
        """Those with full attention."""
        return list(range(self.model.config.num_hidden_layers))

    def blocks_bytes(self, blocks: int, block_tokens: int) -> int:
        """Memory of that many blocks of its cache, in float32."""
        config = self.model.config
        of_token = config.num_hidden_layers * self.kv_heads * config.head_dim * 2 * 4
        return blocks * block_tokens * of_token

    def library(
        self, ids: list[int], policy: Policy, tokens: int
    ) -> tuple[list[int], CompressedCache]:
        """The library's greedy answer to a prompt, and the cache with what it kept."""
        cache = CompressedCache(self.model, policy)
        return generated(self.model, ids, cache, tokens), cache

    def answer(self, ids: list[int], policy: Policy, tokens: int) -> list[int]:
        """The library's greedy answer to a prompt."""
        return self.library(ids, policy, tokens)[0]

    def kept(self, cache: CompressedCache, layer: int, budget: int) -> torch.Tensor:
        """What the library kept of a prompt: (1, Hkv, budget)."""
        return cache.kept_positions(layer)[..., :budget].expand(-1, self.kv_heads, -1)


def with_tokenizer(folder: Path) -> SmallModel:
    """A model with the demo's tokenizer, as a server needs one."""
    tokenizer = load("demo").tokenizer
    tokenizer.save_pretrained(folder)
    return SmallModel(folder, vocab_size=len(tokenizer))
