"""Keys are rotated like the text decoder rotates them, also in models that accept images."""

import pytest
import torch
from transformers import DynamicCache

from snapkv import CompressedCache, ExpectedAttention, StreamingLLM, UnsupportedModelError
from snapkv.hf.model_parts import rotations_of
from tests.families import peaked_model, tiny_config, tiny_model
from tests.matrix.images import image_of
from tests.matrix.shrinking import seeing

SEEING = "qwen2_5_vl", "glm4v", "qwen3_5"
# One way of rotating each: halves, the first half of a head, neighbours in pairs, both of these,
# tables of half the width and sinks of the model's own, two kinds.
ROTARY = "llama", "phi3", "cohere", "glm4", "gpt_oss", "gemma3_text"
SCALED = {  # YaRN also stretches its tables; a key that was stretched is not stretched again
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
PROMPT, BEFORE, FURTHER = 44, 4, 400
POLICIES = ExpectedAttention(24, window_size=8), StreamingLLM(24)

every_policy = pytest.mark.parametrize("policy", POLICIES, ids=[each.name for each in POLICIES])


def text(tokens=PROMPT):
    return torch.randint(3, 50, (1, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def keys_at(model, start):
    """Return the keys in each full-attention layer of a text that begins at `start`."""
    cache = DynamicCache(config=model.config)
    positions = torch.arange(start, start + PROMPT)[None]
    model(text(), position_ids=positions, past_key_values=cache)
    held = (getattr(layer, "keys", None) for layer in cache.layers)
    return {index: keys for index, keys in enumerate(held) if keys is not None}


def model_of(name):
    if name in SCALED:
        rope = {"rope_type": name, "rope_theta": 1e4, **SCALED[name]}
        return peaked_model(tiny_config("llama", rope_parameters=rope), "eager")
    return seeing(name) if name in SEEING else tiny_model(name, "eager")


@pytest.mark.parametrize("name", [*SEEING, *ROTARY, *SCALED])
def test_rotated_keys_equal_keys_computed_at_target_positions(name):
    """Rotation to earlier positions is tested as well."""
    model = model_of(name)
    first, later = keys_at(model, 0), keys_at(model, FURTHER)
    full = CompressedCache(model, StreamingLLM(8)).compressed_layers
    for index, rotation in rotations_of(model, full).items():
        assert (first[index] - later[index]).norm() > 0.1 * first[index].norm()
        for keys, other, by in ((first, later, FURTHER), (later, first, -FURTHER)):
            turned = rotation(keys[index], torch.full((1, PROMPT), by))
            torch.testing.assert_close(turned, other[index], atol=1e-4, rtol=1e-3)


@every_policy
@pytest.mark.parametrize("name", SEEING)
def test_text_is_compressed_and_text_with_image_is_refused(name, policy):
    model, image = seeing(name), image_of(name)
    options = {"max_new_tokens": 3, "do_sample": False}
    cache = CompressedCache(model, policy)
    model.generate(text(), past_key_values=cache, **options)
    assert cache.report().kept_tokens < PROMPT
    cache, ids = CompressedCache(model, policy), image.placed(text(), BEFORE)
    with pytest.raises(UnsupportedModelError, match=r"^policy: .* image.*SnapKV"):
        model.generate(ids, past_key_values=cache, **image.arguments(ids), **options)
    assert cache.get_seq_length() == 0
