"""A second image in a later turn, in plain calls: image tokens attend in both directions."""

import copy
import functools

import pytest
import torch
from transformers import DynamicCache

from snapkv import AdaKV, CompressedCache, SnapKV, UnsupportedModelError
from snapkv.hf import masks
from tests.matrix.images import image_of
from tests.matrix.shrinking import seeing
from tests.oracle import masked_judge

PROMPT, BEFORE = 44, 4
SNAPKV = SnapKV(24, window_size=8)


@functools.cache
def gemma3():
    """Return Gemma 3 with full attention in every layer, so that uneven budgets need masks."""
    config = copy.deepcopy(seeing("gemma3").config)
    text = config.get_text_config(decoder=True)
    text.layer_types = ["full_attention"] * len(text.layer_types)
    torch.manual_seed(0)
    return type(seeing("gemma3"))(config).eval()


def with_image(tokens, seed):
    drawn = torch.randint(2, 50, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return image_of("gemma3").placed(drawn, BEFORE)


@torch.no_grad()
def turn(model, cache, new, before=None):
    """Return the logits of a turn with an image; the call marks the image tokens of the text."""
    image = image_of("gemma3")
    whole = new if before is None else torch.cat([before, new], dim=1)
    if isinstance(cache, CompressedCache) and before is not None:
        cache.expect_prompt(whole.shape[1])
    told = image.arguments(new) | image.types(whole)
    mask = torch.ones_like(whole)
    return model(new, past_key_values=cache, attention_mask=mask, **told).logits


def test_second_image_with_recall_gives_same_logits_as_full_cache():
    model, judge = gemma3(), masked_judge(gemma3())
    cache, full = (
        CompressedCache(model, AdaKV(SNAPKV), recall="host"),
        DynamicCache(config=judge.config),
    )
    first, second = with_image(PROMPT, 1), with_image(PROMPT + 3, 2)
    turn(model, cache, first)
    turn(judge, full, first)
    ours, theirs = turn(model, cache, second, first), turn(judge, full, second, first)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


REFUSED = {
    "even": (SNAPKV, {}),
    "compressed": (SNAPKV, {"turns": "compress"}),
    "heads": (AdaKV(SNAPKV), {}),
    "codes": (SNAPKV, {"quantize": "int8"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_second_image_without_recall_is_refused_before_any_token_is_stored(name):
    policy, options = REFUSED[name]
    cache, first = CompressedCache(gemma3(), policy, **options), with_image(PROMPT, 1)
    turn(gemma3(), cache, first)
    with pytest.raises(UnsupportedModelError, match="see each other in both directions"):
        turn(gemma3(), cache, with_image(PROMPT, 2), first)
    assert {layer.get_seq_length() for layer in cache.layers} == {PROMPT}
    cache.expect_prompt(PROMPT + 5)
    with torch.no_grad():
        gemma3()(first[:, :BEFORE], past_key_values=cache)


def test_sees_ahead_matches_worked_example():
    """Two queries follow two stored tokens; the first query may or may not see the second one."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1]]).bool()[None, None]
    assert masks.sees_ahead(mask, 2)
    assert not masks.sees_ahead(mask.tril(2), 2)
