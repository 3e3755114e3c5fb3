"""Attention of a piece of a prompt, computed in two parts and merged, equals the definition."""

import pytest
import torch

from snapkv.ops import causal
from snapkv.ops.causal import attend_in_parts, is_faster_in_parts
from tests.pairs import pairs


def defined_attention(queries, keys, values, scaling):
    """Compute causal attention by its definition, (B, Hq, Q, Dv) in float64."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (states.double().repeat_interleave(groups, dim=1) for states in (keys, values))
    scores = queries.double() @ keys.mT * scaling
    past = keys.shape[2] - queries.shape[2]
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=keys.device).triu_(past + 1)
    return scores.masked_fill(ahead, float("-inf")).softmax(dim=-1) @ values


def cpu_attention(queries, keys, values, is_causal, scaling):
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (states.repeat_interleave(groups, dim=1) for states in (keys, values))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(queries, keys, values, 0.0, is_causal, scale=scaling)


def states(device, dtype, heads, kv_heads, new, past, head_dim=64):
    generator = torch.Generator().manual_seed(new)
    made = (
        torch.randn(2, count, tokens, head_dim, generator=generator).to(device, dtype)
        for count, tokens in ((heads, new), (kv_heads, past + new), (kv_heads, past + new))
    )
    return tuple(made)


@pairs(heads=(4, 6), kv_heads=(1, 2), new=(2, 65, 130), past=(1, 64, 200), scaling=(0.3, 0.125))
def test_attention_in_parts_equals_the_definition(heads, kv_heads, new, past, scaling, monkeypatch):
    monkeypatch.setattr(causal, "_cudnn", cpu_attention)
    given = states("cpu", torch.float32, heads, kv_heads, new, past)
    attended = attend_in_parts(*given, scaling)
    expected = defined_attention(*given, scaling).float()
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)


def test_cpu_does_not_attend_in_parts():
    assert not is_faster_in_parts(*states("cpu", torch.float32, 4, 2, 10, 20))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_in_parts_on_a_gpu_equals_the_definition(dtype, kv_heads):
    given = states("cuda", dtype, 8, kv_heads, 300, 500, head_dim=128)
    if not is_faster_in_parts(*given):
        pytest.skip("cuDNN attends in parts on Hopper and later")
    expected = defined_attention(*given, 0.1)
    differs = (attend_in_parts(*given, 0.1).double() - expected).norm() / expected.norm()
    assert differs < 1e-2
    given[0].requires_grad_()
    assert not is_faster_in_parts(*given)
