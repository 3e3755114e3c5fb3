"""Separately read documents, joined in one cache, equal a slow reference."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from snapkv import AdaKV, CompressedCache, FullCache, SnapKV
from snapkv_app.library import blend, joined_ids, recomputing
from snapkv_app.library.joining import join
from snapkv_app.library.recomputing import falling, most_changed, recompute
from tests.families import call, random_ids, tiny_config, tiny_model
from tests.library import reference
from tests.library.reference import read_part

FAMILIES = ("llama", "mixtral", "cohere", "qwen3", "phi3", "granite", "olmo2", "glm4")

alternating = pytest.mark.parametrize(
    ("family", "implementation"),
    [(family, ("sdpa", "eager")[place % 2]) for place, family in enumerate(FAMILIES)],
)


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


def blended(model, parts, share):
    ids = joined_ids(parts)
    counts = falling(share, ids.shape[1], model.config.num_hidden_layers)
    if any(counts):
        return reference.blended(model, parts, ids, counts)
    return reference.states_read_in_place(model, parts)


def assert_holds(cache, model, parts, expected, tolerance=2e-5):
    tokens = joined_ids(parts).shape[1]
    assert cache.get_seq_length() == tokens
    for index, (keys, values) in enumerate(expected):
        own_keys, own_values, held = reference.states_held(cache, index, tokens)
        assert torch.equal(held, reference.held_by_heads(parts, index))
        for own, wanted in ((own_keys, keys), (own_values, values)):
            scale = float(wanted.abs().max())
            assert torch.allclose(own[held], wanted[held], atol=tolerance * scale, rtol=1e-4)


@alternating
def test_recomputed_tokens_attend_to_all_documents_in_place(family, implementation):
    model = tiny_model(family, implementation)
    parts, policy = documents(model, (9, 14, 6)), SnapKV(20, window_size=4)
    cache = blend(model, parts, policy, recompute=0)
    assert_holds(cache, model, parts, reference.states_read_in_place(model, parts))
    expected = blended(model, parts, 0.3)
    assert_holds(blend(model, parts, policy, recompute=0.3), model, parts, expected)


def few(budget=8):
    return SnapKV(budget, window_size=2)


def uneven(budget=8):
    return AdaKV(few(budget))


def test_recomputing_everything_equals_reading_in_full():
    model = tiny_model("llama", "sdpa")
    parts, question = documents(model, (9, 14, 6)), random_ids(1, 7, seed=50)
    ids = torch.cat([joined_ids(parts), question], dim=1)
    plain = CompressedCache(model, SnapKV(20, window_size=4))
    wanted = model.generate(ids, past_key_values=plain, max_new_tokens=6, do_sample=False)
    cache = blend(model, parts, SnapKV(20, window_size=4), recompute=1)
    given = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(given, wanted)
    for layer in cache.compressed_layers:
        assert torch.equal(cache.kept_positions(layer), plain.kept_positions(layer))


def test_models_of_other_shapes_equal_the_reference():
    """Models have as many KV heads as query heads, partial rotation, or other argument names."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
    neox = AutoConfig.for_model("gpt_neox", vocab_size=128, intermediate_size=96, **sizes)
    for config in (tiny_config("llama", num_key_value_heads=8), neox):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        parts = documents(model, (9, 14, 6), 3, [None, uneven(8), few(6)])
        expected = blended(model, parts, 0.3)
        assert_holds(blend(model, parts, recompute=0.3), model, parts, expected)


@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_few_layers_equal_the_full_reading(layers):
    model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=layers)).eval()
    parts = documents(model, (9, 14, 6))
    plain = DynamicCache(config=model.config)
    call(model, plain, joined_ids(parts))
    cache = blend(model, parts, FullCache(), recompute=0.1)
    assert_holds(cache, model, parts, [(each.keys[0], each.values[0]) for each in plain.layers])


def test_choosing_all_tokens_equals_a_full_reading_up_to_rounding():
    model = tiny_model("qwen3", "sdpa")
    parts = documents(model, (9, 14, 6))
    ids = joined_ids(parts)
    counts = [ids.shape[1]] * (model.config.num_hidden_layers - 1)
    joined = recompute(model, ids, join(model, parts), counts)
    read = DynamicCache(config=model.config)
    call(model, read, ids)
    for own, wanted in zip(joined, read.layers, strict=True):
        assert torch.allclose(own.key_states, wanted.keys, atol=1e-4, rtol=1e-4)
        assert torch.allclose(own.value_states, wanted.values, atol=1e-4, rtol=1e-4)


def test_equal_deviations_are_resolved_by_position():
    deviation = torch.tensor([0.0, 4.0, 1.0, 4.0, 4.0])
    assert most_changed(deviation, 1).tolist() == [1]
    assert most_changed(deviation, 2).tolist() == [1, 3]
    assert most_changed(deviation, 4).tolist() == [1, 2, 3, 4]
    assert most_changed(deviation, 5).tolist() == [0, 1, 2, 3, 4]


def test_number_of_recomputed_tokens_falls_with_the_layers():
    """The factor is the square root of a tenth for each of two steps."""
    assert falling(0.2, 1000, 4) == [200, 63, 20]
    assert falling(0.2, 1000, 2) == [200]
    assert falling(0.2, 1000, 1) == []


@pytest.mark.parametrize("layers", [2, 3, 30])
def test_recomputed_tokens_grow_with_the_fraction_without_a_jump(layers):
    counts = [falling(step / 1000, 10_000, layers) for step in range(1001)]
    assert counts[0] == [0] * (layers - 1)
    assert counts[-1] == [10_000] * (layers - 1)
    assert counts[500][-1] == (500 if layers > 2 else 5000)
    for fewer, more in itertools.pairwise(counts):
        assert all(0 <= b - a < 70 for a, b in zip(fewer, more, strict=True))


@pytest.fixture(autouse=True)
def _pieces(monkeypatch):
    """Of more tokens than this the chosen ones are read one piece behind the other."""
    monkeypatch.setattr(recomputing, "_PIECE_TOKENS", 3)


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_documents_are_joined_like_the_reference(data):
    model = tiny_model("llama", data.draw(st.sampled_from(["sdpa", "eager"])))
    recomputing._PIECE_TOKENS = data.draw(st.sampled_from([3, 64]))
    count = data.draw(st.integers(2, 4))
    prefix_tokens = data.draw(st.integers(0, 3))
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=count, max_size=count))
    policy = st.sampled_from([None, few(3), few(6), uneven(6)])
    policies = data.draw(st.lists(policy, min_size=count, max_size=count))
    parts = documents(model, lengths, prefix_tokens, policies)
    share = data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.999]))
    cache = blend(model, parts, FullCache(), recompute=share)
    assert_holds(cache, model, parts, blended(model, parts, share), tolerance=1e-4)
