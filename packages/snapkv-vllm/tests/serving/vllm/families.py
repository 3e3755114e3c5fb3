"""Small random models of the families that people serve, from their own configuration classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import tiny_config
from tests.serving.vllm.models import SmallModel

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


def _config(family: str) -> Any:
    return tiny_config(family, **{**_HEADS, **_OWN.get(family, {})})


class FamilyModel(SmallModel):
    """A model of a family, in a folder for vLLM and in this process for the library.

    Args:
        folder: where to save it.
        family: of `tests.families`.
    """

    def __init__(self, folder: Path, family: str) -> None:
        if family == "deepseek_v3" and torch.cpu._is_amx_tile_supported():
            pytest.skip("vLLM's latent attention with AMX loads no weights in float32")
        torch.manual_seed(0)
        config = _config(family)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        self.model, self.folder = model.float().eval(), str(folder)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if weight.ndim >= 2 and "embed" not in name:
                    weight.mul_(4.0)
                if name.endswith("sinks"):
                    weight.normal_()
        self.model.save_pretrained(folder)
        if family == "cohere2":  # vLLM's window there is one wider than what the file says
            self._rewrite(sliding_window=config.sliding_window - 1)

    def _rewrite(self, **changes: Any) -> None:
        file = Path(self.folder, "config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    @property
    def compressed_layers(self) -> list[int]:
        """Those with full attention."""
        layers = range(self.model.config.num_hidden_layers)
        types = getattr(self.model.config, "layer_types", None)
        return [one for one in layers if types is None or types[one] == "full_attention"]
