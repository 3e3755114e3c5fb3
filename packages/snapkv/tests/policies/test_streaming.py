"""StreamingLLM numbers tokens by their place in the cache: judged by keys stored unrotated.

The reference shares nothing with the library. The family's `apply_rotary_pos_emb` is replaced by
one that hands the states on as they are, so attention sees raw queries and keys; it stores the raw
keys and rotates every one by its slot index, on every call anew.
"""

import copy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from snapkv import CompressedCache, UnsupportedModelError
from snapkv.policies import StreamingLLM
from tests.families import (
    IMPLEMENTATIONS,
    peaked_model,
    random_ids,
    tiny_config,
    tiny_gpt2,
    tiny_model,
)
from tests.oracle import unwrapped

START, RECENT, PROMPT = 3, 17, 50
BUDGET = START + RECENT
POLICY = StreamingLLM(start=START, recent=RECENT)

_slots: dict[int, list[torch.Tensor]] = {}
_rotate: dict[str, object] = {}


def _attend_by_slots(module, query, key, value, attention_mask, **options):
    """Eager attention over raw keys, each rotated by its slot; then all but the budget goes."""
    family = sys.modules[type(module).__module__]
    if module.layer_idx in _slots:
        keys, values = _slots[module.layer_idx]
        key, value = torch.cat([keys, key], 2), torch.cat([values, value], 2)
    new, stored = query.shape[2], key.shape[2]
    slots = torch.arange(stored)[None]
    cos, sin = _rotate["embedding"](key, slots)
    _, turned = _rotate["apply"](key, key, cos, sin)
    asked, _ = _rotate["apply"](query, query, cos[:, -new:], sin[:, -new:])
    hidden = torch.ones(new, stored, dtype=torch.bool).triu(stored - new + 1)
    mask = torch.zeros(new, stored).masked_fill(hidden, torch.finfo(torch.float32).min)
    output = family.eager_attention_forward(
        module, asked, turned, value, mask[None, None], **options
    )
    if stored > BUDGET:
        first = [states[:, :, :START] for states in (key, value)]
        last = [states[:, :, -RECENT:] for states in (key, value)]
        key, value = (torch.cat(pair, 2) for pair in zip(first, last, strict=True))
    _slots[module.layer_idx] = [key, value]
    return output


AttentionInterface.register("slots_oracle", _attend_by_slots)
AttentionMaskInterface.register("slots_oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@pytest.fixture
def slots_logits(monkeypatch):
    """A function: the logits of every piece of text, (B, N, V), row by row."""

    @torch.no_grad()
    def run(model, pieces):
        reference = unwrapped(model, "eager")
        reference.set_attn_implementation("slots_oracle")
        family = sys.modules[type(reference).__module__]
        _rotate.update(embedding=reference.model.rotary_emb, apply=family.apply_rotary_pos_emb)
        with monkeypatch.context() as patched:
            patched.setattr(family, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
            rows = []
            for row in range(pieces[0].shape[0]):
                _slots.clear()
                own = [piece[row : row + 1] for piece in pieces]
                rows.append(torch.cat([reference(p, use_cache=False).logits for p in own], 1))
        return torch.cat(rows)

    return run


@torch.no_grad()
def logits_of(model, policy, pieces, **options):
    cache = CompressedCache(model, policy)
    return torch.cat([model(p, past_key_values=cache, **options).logits for p in pieces], 1), cache


def pieces_of(rows=1, at_once=1, tokens=24, prompt=PROMPT):
    return [random_ids(rows, prompt), *random_ids(rows, tokens, seed=1).split(at_once, dim=1)]


@pytest.mark.parametrize(
    ("family", "at_once"), [("llama", 1), ("phi3", 5), ("cohere", 5), ("glm4", 1)]
)
def test_it_equals_raw_keys_rotated_by_their_slots(family, at_once, slots_logits):
    model, pieces = tiny_model(family), pieces_of(2, at_once)
    got, cache = logits_of(model, POLICY, pieces)
    torch.testing.assert_close(got, slots_logits(model, pieces), atol=5e-4, rtol=5e-4)
    seen = PROMPT + 24
    expected = [*range(START), *range(seen - RECENT, seen)]
    assert cache.kept_positions(0)[1, 0].tolist() == expected, "the positions told stay true"
    original, _ = logits_of(model, StreamingLLM(BUDGET, start=START, positions="original"), pieces)
    assert (original - got).abs().max() > 1e-2, "positions must matter for this to mean anything"


@pytest.mark.parametrize("prompt", [1, BUDGET])
def test_a_cache_that_fills_up_while_generating_equals_it_too(prompt, slots_logits):
    model, pieces = tiny_model("llama"), pieces_of(1, 1, tokens=2 * BUDGET, prompt=prompt)
    got, _ = logits_of(model, POLICY, pieces)
    torch.testing.assert_close(got, slots_logits(model, pieces), atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("family", ["llama", "cohere", "gpt_oss", "cohere2", "gemma3_text"])
def test_only_the_keys_of_the_sinks_are_turned(family):
    model, pieces = tiny_model(family, IMPLEMENTATIONS[family][0]), pieces_of(2)[:1]
    _, moved = logits_of(model, POLICY, pieces)
    _, still = logits_of(model, StreamingLLM(BUDGET, start=START, positions="original"), pieces)
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


def test_rounding_does_not_add_up():
    """After a hundred moves in bfloat16 a sink is as near to its true key as after one."""
    model = copy.deepcopy(unwrapped(tiny_model("llama"), "sdpa")).bfloat16()
    cache = CompressedCache(model, POLICY)
    with torch.no_grad():
        for token in random_ids(1, 120).split(1, dim=1):
            model(token, past_key_values=cache)
    layer = cache.layers[2]
    by = torch.tensor([[120 - BUDGET]])
    expected = layer.identity.rotation(layer.state.sink_keys, by.expand(1, START)).bfloat16()
    assert torch.equal(layer.keys[:, :, :START], expected)


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
REFUSED = {
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic'"),
    "longrope": (
        "llama",
        {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 256, **LONG},
        "rope_type 'longrope'",
    ),
    "latent attention": ("deepseek_v3", None, "DeepseekV3ForCausalLM has latent attention"),
    "learned positions": ("gpt2", None, "GPT2LMHeadModel in layer 0 change"),
}


@pytest.mark.parametrize(("family", "rope", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_moved_is_refused_before_any_work(family, rope, message):
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


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_embeddings_are_moved_rightly(rope, slots_logits):
    """YaRN also stretches its tables; a key that was stretched once is not stretched again."""
    config = tiny_config("llama", rope_parameters={"rope_theta": 1e4, **rope})
    model, pieces = peaked_model(config, "sdpa"), pieces_of(1, 3)
    got, cache = logits_of(model, POLICY, pieces)
    assert (cache.layers[0].identity.rotation.factor > 1.0) is (rope["rope_type"] == "yarn")
    torch.testing.assert_close(got, slots_logits(model, pieces), atol=5e-4, rtol=5e-4)
