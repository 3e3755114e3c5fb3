"""Documents that were read apart, in one cache: against a slow reading of the same promise."""

import pytest
import torch

from snapkv import AdaKV, CompressedCache, SnapKV
from snapkv.library import blend, joined_ids
from tests.families import random_ids, tiny_model
from tests.library import reference
from tests.library.reference import read_part

FAMILIES = (
    "llama", "mistral", "mixtral", "cohere", "qwen2", "qwen3", "qwen3_moe", "phi3", "granite",
    "olmo2", "glm4",
)  # fmt: skip


def documents(model, lengths, prefix_tokens=3, policies=None, **options):
    prefix = random_ids(1, prefix_tokens, seed=99)
    policies = policies or [None] * len(lengths)
    return [
        read_part(
            model,
            torch.cat([prefix, random_ids(1, length, seed=number)], dim=1),
            prefix_tokens,
            policy,
            **options,
        )
        for number, (length, policy) in enumerate(zip(lengths, policies, strict=True))
    ]


def assert_holds(cache, model, parts, expected, tolerance=2e-5):
    tokens = joined_ids(parts).shape[1]
    assert cache.get_seq_length() == tokens
    for index, (keys, values) in enumerate(expected):
        own_keys, own_values, held = reference.states_held(cache, index, tokens)
        assert torch.equal(held, reference.held_by_heads(parts, index))
        for own, wanted in ((own_keys, keys), (own_values, values)):
            scale = float(wanted.abs().max())
            assert torch.allclose(own[held], wanted[held], atol=tolerance * scale, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_reused_keys_stand_where_the_model_would_have_read_them(family):
    model = tiny_model(family, "sdpa")
    parts = documents(model, (9, 14, 6))
    cache = blend(model, parts, SnapKV(20, window_size=4), recompute=0)
    assert_holds(cache, model, parts, reference.states_read_in_place(model, parts))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chosen_tokens_are_read_over_all_others(family, implementation):
    model = tiny_model(family, implementation)
    parts = documents(model, (9, 14, 6))
    ids = joined_ids(parts)
    _, expected = reference.blended(model, parts, ids, 9)
    cache = blend(model, parts, SnapKV(20, window_size=4), recompute=0.3)
    assert_holds(cache, model, parts, expected)
