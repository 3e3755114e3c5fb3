"""StreamingLLM with positions in the cache: the keys of its sinks are rotated.

How keys are turned in each family is judged in `tests/models/test_rotations.py`.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from snapkv import CompressedCache, UnsupportedModelError
from snapkv.policies import StreamingLLM
from tests.families import (
    IMPLEMENTATIONS,
    call,
    random_ids,
    read,
    tiny_config,
    tiny_gpt2,
    tiny_model,
)
from tests.oracle import unwrapped

START, RECENT, PROMPT = 3, 17, 50
BUDGET = START + RECENT
POLICY = StreamingLLM(start=START, recent=RECENT)
ORIGINAL = StreamingLLM(BUDGET, start=START, positions="original")


@pytest.mark.parametrize("family", ["llama", "cohere", "gpt_oss", "cohere2", "gemma3_text"])
def test_only_the_keys_of_the_sinks_are_rotated(family):
    model, ids = tiny_model(family, IMPLEMENTATIONS[family][0]), random_ids(2, PROMPT)
    moved, still = (read(model, policy, ids) for policy in (POLICY, ORIGINAL))
    for index in moved.compressed_layers:
        one, other = moved.layers[index], still.layers[index]
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.keys[:, :, START:], other.keys[:, :, START:])
        assert torch.equal(moved.kept_positions(index), still.kept_positions(index))
        assert torch.equal(one.state.sink_keys, other.keys[:, :, :START])
        turned = not torch.equal(one.keys, other.keys)
        assert turned is (one.identity.rotation.apply is not None)
        norms = [layer.keys[:, :, :START].norm(dim=-1) for layer in (one, other)]
        torch.testing.assert_close(*norms)


def test_rounding_errors_of_rotated_sinks_do_not_accumulate():
    """A sink is as accurate after twenty rotations in bfloat16 as after one."""
    model = copy.deepcopy(unwrapped(tiny_model("llama"), "sdpa")).bfloat16()
    moved, still = (CompressedCache(model, policy) for policy in (POLICY, ORIGINAL))
    for token in random_ids(1, BUDGET + 20).split(1, dim=1):
        for cache in (moved, still):
            call(model, cache, token)
    keys = still.layers[2].keys[:, :, :START]
    expected = moved.layers[2].identity.rotation(keys, torch.full((1, START), 20)).bfloat16()
    assert torch.equal(moved.layers[2].keys[:, :, :START], expected)


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REFUSED = {
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic'"),
    "longrope": (
        "llama",
        {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 256, **LONG},
        "rope_type 'longrope'",
    ),
    "latent attention": ("deepseek_v3", None, "DeepseekV3ForCausalLM uses latent attention"),
    "learned positions": ("gpt2", None, "GPT2LMHeadModel in layer 0 depend"),
}


@pytest.mark.parametrize(("family", "rope", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_rotations_are_refused_before_the_model_is_changed(family, rope, message):
    changes = {} if rope is None else {"rope_parameters": {"rope_theta": 1e4, **rope}}
    if family == "gpt2":
        model = tiny_gpt2()
    else:
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()
    with pytest.raises(UnsupportedModelError, match=message):
        CompressedCache(model, POLICY)
    assert not model.config._attn_implementation.startswith("snapkv"), "nothing was touched"
    CompressedCache(model, StreamingLLM(BUDGET, positions="original"))
    CompressedCache(model, StreamingLLM(BUDGET, start=0))
