"""Prompts with an image, whose tokens may stand at positions of three axes."""

import pytest
import torch
from transformers import DynamicCache

from snapkv import AdaKV, CompressedCache, UnsupportedModelError
from tests.matrix.cells import (
    CLOSE,
    CLOSE_IN_CODES,
    NEW,
    POLICY,
    PROMPT,
    Text,
    require_close,
)
from tests.matrix.shrinking import MODELS, tiny
from tests.oracle import hidden_columns, masked_judge, masked_pass

IMAGE_TOKENS = 4
STOPS = (*range(PROMPT + 1, PROMPT + NEW + 1), PROMPT + NEW + 11, PROMPT + NEW + 12)
PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PIXELS = ("gemma3", "llava")
WAYS = {
    "snapkv": (POLICY, {}, CLOSE),
    "AdaKV": (AdaKV(POLICY), {}, CLOSE),
    "int8": (POLICY, {"quantize": "int8"}, CLOSE_IN_CODES),
    "turns": (POLICY, {"turns": "compress"}, CLOSE),
}
"""A policy, options of the cache, and how close its logits are."""


def image_options(model):
    """What goes with an image of 32 by 32 pixels, and the id of its tokens."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    if config.model_type in PIXELS:
        size = config.vision_config.image_size
        pixels = torch.randn(1, 3, size, size, generator=generator)
        image_id = getattr(config, "image_token_id", None) or config.image_token_index
        return {"pixel_values": pixels}, image_id
    vision, side = config.vision_config, 2 * config.vision_config.spatial_merge_size
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    patches = torch.randn(side * side, width, generator=generator)
    grid = torch.tensor([[1, side, side]])
    return {"pixel_values": patches, "image_grid_thw": grid}, config.image_token_id


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*PATCHES, *PIXELS])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_an_image_in_the_prompt(name, way, tmp_path):
    if name not in MODELS:
        pytest.skip("not in this transformers")
    model, text = tiny(name), Text.drawn(STOPS[-1])
    options, image_id = image_options(model)
    tokens = IMAGE_TOKENS
    if name == "llava":
        tokens = (
            model.config.vision_config.image_size // model.config.vision_config.patch_size
        ) ** 2
    text.ids[:, 6 : 6 + tokens] = image_id
    options["mm_token_type_ids"] = (text.ids[:, :PROMPT] == image_id).int()
    if name == "gemma3":
        options["token_type_ids"] = options.pop("mm_token_type_ids")
    policy, given, close = WAYS[way]
    judge, cache = masked_judge(model), CompressedCache(model, policy, **given)
    full = DynamicCache(config=judge.config.get_text_config(decoder=True))
    prompt = text.ids[:, :PROMPT]
    found = model(prompt, past_key_values=cache, **options).logits[:, -1]
    require_close(found, judge(prompt, past_key_values=full, **options).logits[:, -1], "prompt")
    start = PROMPT
    for stop in STOPS if way == "turns" else STOPS[:-2]:
        if stop - start > 1:
            cache.expect_prompt(stop)
        token, hidden = text.ids[:, start:stop], hidden_columns(cache, start)
        start = stop
        expected = masked_pass(judge, full, hidden, token, None, None)
        found = model(token, past_key_values=cache).logits
        require_close(found[:, -1], expected[:, -1], f"column {stop}", close)
    assert cache.report().kept_tokens == POLICY.budget + (1 if way == "turns" else NEW)
    if name in PATCHES:
        with pytest.raises(UnsupportedModelError, match="rope_deltas"):
            cache.save(tmp_path / "cache")
