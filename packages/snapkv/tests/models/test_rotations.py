"""Keys turn as the text decoder's rotary embedding turns them, in models that see images, too."""

import pytest
import torch
from transformers import DynamicCache

from snapkv import CompressedCache, ExpectedAttention, StreamingLLM, UnsupportedModelError
from snapkv.hf.model_parts import rotations_of
from tests.matrix.images import image_of
from tests.matrix.shrinking import seeing

MODELS = "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_5"
PROMPT, BEFORE, FURTHER = 44, 4, 5
POLICIES = ExpectedAttention(24, window_size=8), StreamingLLM(24)

every_model = pytest.mark.parametrize("name", MODELS)
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=[each.name for each in POLICIES])


def text(tokens=PROMPT):
    return torch.randint(3, 50, (1, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def keys_at(model, start):
    """The keys that every full layer holds of a text that begins at a position, by layer."""
    cache = DynamicCache(config=model.config)
    positions = torch.arange(start, start + PROMPT)[None]
    model(text(), position_ids=positions, past_key_values=cache)
    held = (getattr(layer, "keys", None) for layer in cache.layers)
    return {index: keys for index, keys in enumerate(held) if keys is not None}


@every_model
def test_turned_keys_are_those_of_a_text_that_begins_later(name):
    model = seeing(name)
    first, later = keys_at(model, 0), keys_at(model, FURTHER)
    rotations = rotations_of(model, list(first))
    for index, keys in first.items():
        turned = rotations[index](keys, torch.full((1, PROMPT), FURTHER))
        assert (keys - later[index]).norm() > 0.1 * keys.norm()
        torch.testing.assert_close(turned, later[index], atol=1e-4, rtol=1e-3)


@every_policy
@every_model
def test_text_is_compressed_and_text_behind_an_image_refused(name, policy):
    model, image = seeing(name), image_of(name)
    options = {"max_new_tokens": 3, "do_sample": False}
    cache = CompressedCache(model, policy)
    model.generate(text(), past_key_values=cache, **options)
    assert cache.report().kept_tokens < PROMPT
    cache, ids = CompressedCache(model, policy), image.placed(text(), BEFORE)
    with pytest.raises(UnsupportedModelError, match=r"^policy: .* image.*SnapKV"):
        model.generate(ids, past_key_values=cache, **image.arguments(ids), **options)
    assert cache.get_seq_length() == 0
