"""The fidelity check: the scores of the votes must reproduce the attention of the model."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from snapkv import CacheMismatchError, CompressedCache, SnapKV
from snapkv.cache import layer_group
from snapkv.errors import UnsupportedModelError
from snapkv.hf import fidelity
from snapkv.hf.fidelity import doubt_scores, require_faithful
from snapkv.ops import ScoreOptions
from tests.families import random_ids, read, tiny_model
from tests.ops.states import worked_layer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


class TemperedAttention(torch.nn.Module):
    """An attention module of a model family that changes its scores."""


def states(dtype=torch.float32, **changes):
    """Return a layer with random states whose attention is far from uniform."""
    source = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 4, 5, 16, generator=source) * 2
    keys = torch.randn(2, 2, 40, 16, generator=source)
    values = torch.randn(2, 2, 40, 12, generator=source)  # DeepSeek's values are narrower
    given = (each.to(dtype) for each in (keys, values, queries))
    return replace(worked_layer(*given, scaling=0.25, layer_idx=7), **changes)


def with_scores(layer, **changed):
    return replace(layer, score_options=replace(layer.score_options, **changed))


def attention_output(layer, *, scaling=0.25, bias=None, row=0):
    """Return the attention output of the model for the last query of a row, (1, Hq, Dv)."""
    pads = 0 if layer.pad_tokens is None else int(layer.pad_tokens[row])
    output = F.scaled_dot_product_attention(
        layer.queries[row : row + 1, :, -1:],
        layer.keys[row : row + 1, :, pads:],
        layer.values[row : row + 1, :, pads:],
        attn_mask=bias,
        scale=scaling,
        enable_gqa=True,
    )
    return output[:, :, 0]


def whole_output(layer, **options):
    return torch.cat([attention_output(layer, row=row, **options) for row in range(2)])


def require_faithful_scores(layer, output, module):
    doubt = doubt_scores(layer, output, module)
    require_faithful([] if doubt is None else [doubt])


def module():
    return TemperedAttention().eval()


def assert_refused(layer, output, match="TemperedAttention"):
    with pytest.raises(UnsupportedModelError, match=match):
        require_faithful_scores(layer, output, module())


@dtypes
@pytest.mark.parametrize("scaling", [0.125, 0.25, 0.5])
def test_scaling_of_model_is_accepted_and_other_scaling_is_refused(dtype, scaling):
    layer = states(dtype, score_options=ScoreOptions(scaling=scaling))
    require_faithful_scores(layer, whole_output(layer, scaling=scaling), module())
    assert_refused(layer, whole_output(layer, scaling=1.0), r"TemperedAttention.*in layer 7")


@dtypes
def test_position_bias_and_nan_output_are_refused(dtype):
    """The bias grows with the distance, as in ALiBi."""
    layer = states(dtype)
    bias = (torch.arange(40) * 0.1).to(dtype).expand(1, 1, 1, 40)
    assert_refused(layer, whole_output(layer, bias=bias))
    output = whole_output(layer)
    output[0, 0, 0] = float("nan")
    assert_refused(layer, output, "TemperedAttention in layer 7 has returned NaN or infinity")


def softmax_output(layer, change, *, sinks=None):
    """Return attention of the last query, (2, 4, 12), with `change` applied to its scores."""
    keys = layer.keys.repeat_interleave(2, dim=1)
    values = layer.values.repeat_interleave(2, dim=1)
    scores = change(torch.einsum("bhd,bhtd->bht", layer.queries[:, :, -1], keys) * 0.25)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, 4, 1).expand(2, 4, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :40]
    return torch.einsum("bht,bhtd->bhd", weights, values)


def test_fidelity_check_applies_softcap_to_scores():
    layer = states()
    capped = softmax_output(layer, lambda scores: 2.0 * torch.tanh(scores / 2.0))
    require_faithful_scores(with_scores(layer, softcap=2.0), capped, module())
    assert_refused(layer, capped)
    assert_refused(with_scores(layer, softcap=2.0), whole_output(layer))


def test_fidelity_check_includes_sinks_in_softmax():
    layer = states()
    sinks = torch.tensor([2.0, -1.0, 0.5, 3.0])
    output = softmax_output(layer, lambda scores: scores, sinks=sinks)
    require_faithful_scores(with_scores(layer, sink_logits=sinks), output, module())
    assert_refused(layer, output)
    assert_refused(with_scores(layer, sink_logits=sinks.flip(0)), output)


@dtypes
def test_fidelity_check_excludes_padding(dtype):
    layer = states(dtype)
    padded = replace(layer, pad_tokens=torch.tensor([11, 0]))
    require_faithful_scores(padded, whole_output(padded), module())
    assert_refused(padded, whole_output(layer))


def test_fidelity_check_is_skipped_in_training_mode():
    layer = states()
    require_faithful_scores(layer, whole_output(layer) * 2, TemperedAttention().train())
    assert_refused(layer, whole_output(layer) * 2)


@pytest.mark.parametrize("scaling", [1.0, 2 * 128**-0.5], ids=["forgotten", "twice"])
def test_wrong_scaling_in_bfloat16_is_refused_even_with_large_scores(scaling):
    """Fused attention holds its scores in float32, however large they are."""
    source = torch.Generator().manual_seed(0)
    queries = (torch.randn(1, 8, 1, 128, generator=source) * 4).bfloat16()
    keys, values = torch.randn(2, 1, 2, 500, 128, generator=source).bfloat16()
    output = F.scaled_dot_product_attention(
        queries, keys, values, scale=128**-0.5, enable_gqa=True
    )[:, :, 0]
    layer = worked_layer(keys, values, queries, scaling=scaling)
    assert_refused(layer, output)
    require_faithful_scores(with_scores(layer, scaling=128**-0.5), output, module())


@pytest.mark.parametrize("most_bytes", [0, 5000])
@pytest.mark.parametrize("wrong", [0, 3])
def test_fidelity_of_later_layers_is_checked_together_at_prompt_end(wrong, most_bytes, monkeypatch):
    """The first layers are checked when they are read, as on a GPU; the error names the layer."""
    model, judged = tiny_model("llama"), []

    def doubtful(prompt, *arguments, **options):
        doubt, layers = doubt_scores(prompt, *arguments, **options), range(prompt.stacked)
        far = torch.tensor([[99.0 * (prompt.layer_idx + at == wrong), 0, 0] for at in layers])
        return replace(doubt, found=doubt.found + far)

    def watched(doubts, *deferred):
        judged.append([layer for doubt in doubts for layer in doubt.layers])
        require_faithful(doubts, *deferred)

    monkeypatch.setattr(layer_group, "MOST_BYTES", {"cpu": most_bytes})
    monkeypatch.setattr(fidelity, "doubt_scores", doubtful)
    monkeypatch.setattr(fidelity, "require_faithful", watched)
    cache = CompressedCache(model, SnapKV(budget=8, window_size=4))
    ids = random_ids(1, 32)
    with pytest.raises(UnsupportedModelError, match=rf"in layer {wrong}\."):
        model(ids, past_key_values=cache)
    first, others = ([0, 1], [2, 3]) if most_bytes else ([0], [1, 2, 3])
    assert judged == ([first] if wrong == 0 else [first, others])
    with pytest.raises(CacheMismatchError, match="reset"):  # what was kept is not to be used
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    wrong = None
    model(ids, past_key_values=cache)
    assert judged[-2:] == [first, others]
    assert not cache._check.doubts


def test_unchecked_doubts_require_reset_and_are_discarded_by_it():
    model, ids = tiny_model("llama"), random_ids(1, 32)
    cache = read(model, SnapKV(budget=8, window_size=4), ids)
    cache._check.doubts.append(doubt_scores(states(), whole_output(states()) * 2, module()))
    with pytest.raises(CacheMismatchError, match="reset"):
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    model(ids, past_key_values=cache)
    assert not cache._check.doubts
