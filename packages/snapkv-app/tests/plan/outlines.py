"""Models of published shapes as transformers builds them, without weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from snapkv.hf.build import plain_layers
from snapkv.hf.cache_argument import passed
from snapkv_app.plan.shapes import SHAPES


def config_of(shape, **changes):
    return AutoConfig.for_model(SHAPES[shape].family, **SHAPES[shape].config | changes)


def outline(shape, *, dtype=torch.bfloat16, **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(shape, **changes), dtype=dtype)


def layers_of_one_token(model):
    """The layers of a cache that has real shapes and no data, with one token in it."""
    cache = DynamicCache(config=model.config)
    cache.layers = plain_layers(model)
    if getattr(model.config, "_experts_implementation", None):
        model.set_experts_implementation("batched_mm")  # the others read data, or compare dtypes
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64, device="meta"), **passed(cache))
    return cache.layers
