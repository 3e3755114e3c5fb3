"""Small random models, in which what is kept decides the answers, and what the library answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from snapkv import CompressedCache
from snapkv.policies import Policy
from snapkv_app.models import load
from tests.families import random_ids, tiny_config

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

# Heads of 32 numbers, since vLLM's kernels for CPUs take no smaller ones.
_HEADS = {"hidden_size": 256, "num_key_value_heads": 4, "head_dim": 32}

_OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"rope_scaling": None, "rope_parameters": {**_YARN, "truncate": False}},
    # The kernel of latent attention is compiled for one size; vLLM's kernel for CPUs that turns
    # positions without scaling overlooks that queries lie apart, so these are scaled.
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "first_k_dense_replace": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}


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
        if family == "deepseek_v3" and torch.cpu._is_amx_tile_supported():
            pytest.skip("vLLM's latent attention with AMX loads no weights in float32")
        torch.manual_seed(0)
        config = tiny_config(family, **{**_HEADS, **_OWN.get(family, {}), **sizes})
        attention = "sdpa" if family == "llama" else "eager"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        self.model, self.folder = model.float().eval(), str(folder)
        self._answered: dict[Any, tuple[list[int], CompressedCache]] = {}
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if weight.ndim >= 2 and "embed" not in name:
                    weight.mul_(4.0)
                if name.endswith("sinks"):
                    weight.normal_()
        self.model.save_pretrained(folder)
        if family == "cohere2":  # vLLM's window there is one wider than what the file says
            self.rewrite_config(sliding_window=config.sliding_window - 1)

    def rewrite_config(self, **changes: Any) -> None:
        """Change the configuration that vLLM reads, and not the one of the library."""
        file = Path(self.folder, "config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    @property
    def compressed_layers(self) -> list[int]:
        """Those with full attention."""
        layers = range(self.model.config.num_hidden_layers)
        types = getattr(self.model.config, "layer_types", None)
        return [one for one in layers if types is None or types[one] == "full_attention"]

    def blocks_bytes(self, blocks: int, block_tokens: int) -> int:
        """Memory of that many blocks of its cache, in float32."""
        config = self.model.config
        of_token = config.num_hidden_layers * self.kv_heads * config.head_dim * 2 * 4
        return blocks * block_tokens * of_token

    def library(
        self, ids: list[int], policy: Policy, tokens: int
    ) -> tuple[list[int], CompressedCache]:
        """The library's greedy answer to a prompt, and the cache with what it kept."""
        asked = tuple(ids), policy, tokens
        if asked not in self._answered:
            cache = CompressedCache(self.model, policy)
            self._answered[asked] = generated(self.model, ids, cache, tokens), cache
        return self._answered[asked]

    def answer(self, ids: list[int], policy: Policy, tokens: int) -> list[int]:
        """The library's greedy answer to a prompt."""
        return self.library(ids, policy, tokens)[0]


def with_tokenizer(folder: Path, **sizes: int) -> SmallModel:
    """A model with the demo's tokenizer, as a server needs one."""
    tokenizer = load("demo").tokenizer
    tokenizer.save_pretrained(folder)
    return SmallModel(folder, vocab_size=len(tokenizer), **sizes)
