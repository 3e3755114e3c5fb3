"""Prompts with an image, whose tokens may stand at positions of three axes."""

import pytest
import torch
from transformers import DynamicCache

from snapkv import CompressedCache
from tests.matrix.cells import NEW, POLICY, PROMPT, Text, require_close
from tests.matrix.shrinking import MODELS, tiny
from tests.oracle import hidden_columns, masked_judge, masked_pass

IMAGE_TOKENS = 4
PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PIXELS = ("gemma3", "llava")


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
@torch.no_grad()
def test_an_image_in_the_prompt(name):
    if name not in MODELS:
        pytest.skip("not in this transformers")
    model, text = tiny(name), Text.drawn(PROMPT + NEW)
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
    judge, cache = masked_judge(model), CompressedCache(model, POLICY)
    full = DynamicCache(config=judge.config.get_text_config(decoder=True))
    prompt = text.ids[:, :PROMPT]
    found = model(prompt, past_key_values=cache, **options).logits[:, -1]
    require_close(found, judge(prompt, past_key_values=full, **options).logits[:, -1], "prompt")
    for stop in range(PROMPT + 1, PROMPT + NEW + 1):
        token, hidden = text.ids[:, stop - 1 : stop], hidden_columns(cache, stop - 1)
        expected = masked_pass(judge, full, hidden, token, None, None)
        found = model(token, past_key_values=cache).logits
        require_close(found[:, -1], expected[:, -1], f"column {stop}")
    assert cache.report().kept_tokens == POLICY.budget + NEW
