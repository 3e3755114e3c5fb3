"""The cache in plain `model(...)` calls: its token counts, its report and its errors."""

import copy
import json
import pickle

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LlamaModel,
)

from snapkv import (
    CacheMismatchError,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    InvalidTypeError,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.storage.tail import ROOM_TOKENS
from tests.families import (
    VOCABULARY,
    call,
    generated,
    kept_of,
    peaked_model,
    random_ids,
    tiny_config,
    tiny_model,
)
from tests.methods import METHODS
from tests.oracle import unwrapped

PROMPT, BUDGET, WINDOW = 80, 36, 8
POLICY = SnapKV(BUDGET, window_size=WINDOW, kernel_size=5)


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def filled(model):
    """Return a cache that has read a prompt of 80 tokens and four more tokens."""
    cache = CompressedCache(model, POLICY)
    call(model, cache, random_ids(2, PROMPT))
    call(model, cache, random_ids(2, 4, seed=1))
    return cache


# Bookkeeping.


def test_is_initialized_matches_dynamic_cache(model):
    for cache in (DynamicCache(config=model.config), CompressedCache(model, POLICY)):
        assert not cache.is_initialized
        call(model, cache, random_ids(2, PROMPT))
        assert cache.is_initialized


def test_crop_removes_window_tokens_but_refuses_to_reach_evicted_tokens(model, filled):
    before, again = copy.deepcopy(filled), random_ids(2, 2, seed=3)
    call(model, filled, random_ids(2, 3, seed=2))
    filled.crop(-3)
    assert torch.equal(call(model, filled, again), call(model, before, again))
    filled.crop(-6 - WINDOW)
    assert filled.get_seq_length() == PROMPT - WINDOW
    assert filled.kept_positions(0).shape[-1] == BUDGET - WINDOW
    with pytest.raises(InvalidArgumentError, match=r"tokens_to_remove.*still stored.*got 30"):
        filled.crop(-30)
    filled.crop(0)
    assert filled.get_seq_length() == PROMPT - WINDOW


class OnlyTheThirdLayer(SnapKV):
    """A policy that evicts tokens only in layer 2."""

    can_select_stacked = False

    def select(self, layer):
        return super().select(layer) if layer.layer_idx == 2 else None


def test_crop_refused_by_one_layer_changes_no_layer(model):
    ids, cache = random_ids(1, PROMPT), CompressedCache(model, OnlyTheThirdLayer(BUDGET))
    call(model, cache, ids)
    before = kept_of(cache)
    with pytest.raises(
        InvalidArgumentError, match="end of layer 2 are still stored by every head, but got 40"
    ):
        cache.crop(-40)
    assert kept_of(cache) == before
    call(model, cache, ids[:, :1])


# The report.


def test_report_counts_bytes_of_stored_tensors_and_of_full_cache(model, filled):
    plain = DynamicCache(config=model.config)
    reference = unwrapped(model, "sdpa")
    call(reference, plain, random_ids(2, PROMPT + 4))
    report = filled.report()
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in filled.layers)
    assert report.full_bytes == report["full_bytes"] == full
    assert report.held_bytes == report["held_bytes"] == held
    assert held * (PROMPT + 4) == full * (BUDGET + 4)
    for row in report["layers"]:
        assert row["kind"] == "compressed"
        assert (row["seen_tokens"], row["kept_tokens"]) == (PROMPT + 4, BUDGET + 4)
    assert sum(row["held_bytes"] for row in report["layers"]) == held
    fresh = CompressedCache(model, POLICY)
    call(model, fresh, random_ids(2, PROMPT))
    assert all(layer.keys.untyped_storage().nbytes() == layer.keys.nbytes for layer in fresh.layers)
    kept = filled.layers[0].keys
    room = kept.untyped_storage().nbytes() - kept.nbytes
    assert room == kept.nbytes // (BUDGET + 4) * ROOM_TOKENS, "and not the whole prompt"


def test_report_serializes_to_json_and_prints_as_table(filled):
    assert json.loads(json.dumps(filled.report())) == filled.report()
    text = str(filled.report())
    assert "84 tokens seen, 36 kept of 80 and 4 after: " in text
    assert repr(filled).startswith(f"CompressedCache({POLICY!r}: 84 tokens seen, 36 kept of 80")
    assert filled.report().kept_tokens == 40
    assert "0-3" in text


def test_notebook_shows_kept_tokens_of_equal_layers_as_one_bar(filled):
    shown = filled._repr_html_()
    assert shown == filled.report()._repr_html_()
    assert "84 tokens seen, 36 kept of 80 and 4 after: " in shown
    assert shown.count("<tr>") == 2, "a heading, and one row for all layers"
    assert "<td>0-3<td>compressed<td>40 of 84<td>" in shown
    assert "width:48%" in shown
    hybrid = CompressedCache(tiny_model("gemma3_text"), POLICY)
    assert "<td>DynamicSlidingWindowLayer<td>0 of 0<td>" in hybrid._repr_html_()


@pytest.mark.parametrize(
    "policy", [SnapKV(200), METHODS["h2o"], METHODS["tova"]], ids=lambda policy: policy.name
)
def test_kept_count_excludes_tokens_appended_after_selection(policy):
    """A policy that evicts after every token has selected all tokens that the cache holds."""
    model, cache = tiny_model("llama"), CompressedCache(tiny_model("llama"), policy)
    assert repr(cache).endswith("0 tokens seen, 0 kept: 0 B of 0 B (100.0%))")
    model.generate(random_ids(1, 80), past_key_values=cache, max_new_tokens=5, do_sample=False)
    kept = {"snapkv": "80 kept of 80 and 4 after"}.get(policy.name, "40 kept")
    assert f"84 tokens seen, {kept}: " in repr(cache)


def test_pickling_a_cache_is_refused_and_points_to_save(filled):
    with pytest.raises(InvalidTypeError, match=r"cache\.save\(path\)"):
        pickle.dumps(filled)


def test_report_names_uncompressed_layers_by_transformers_class():
    model = tiny_model("gemma3_text")
    cache = CompressedCache(model, POLICY)
    call(model, cache, random_ids(1, PROMPT))
    kinds = [row["kind"] for row in cache.report()["layers"]]
    assert kinds == ["DynamicSlidingWindowLayer", "compressed"] * 2
    assert cache.compressed_layers == [1, 3]
    with pytest.raises(InvalidArgumentError, match=r"layer_idx.*\[1, 3\].*got 0"):
        cache.kept_positions(0)


# Refusals.


def test_right_padding_is_refused(model):
    ids, mask = random_ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, -5:] = 0
    with pytest.raises(UnsupportedModelError, match=r"attention_mask.*left.*padding_side"):
        call(model, CompressedCache(model, POLICY), ids, attention_mask=mask)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_changed_batch_size_is_refused_and_leaves_cache_unchanged(family):
    model, message = tiny_model(family), r"expected a batch of 2.*got 3"
    cache = CompressedCache(model, POLICY)
    call(model, cache, random_ids(2, PROMPT))
    before = cache.report()
    with pytest.raises(CacheMismatchError, match=message):
        call(model, cache, random_ids(3, 1))
    with pytest.raises(CacheMismatchError, match=message):
        model.generate(random_ids(3, PROMPT + 2), past_key_values=cache, max_new_tokens=1)
    assert cache.report() == before
    call(model, cache, random_ids(2, 1))


def test_beam_search_on_filled_cache_is_refused_until_rows_are_repeated(model):
    cache, ids = CompressedCache(model, POLICY), random_ids(1, PROMPT + 2)
    call(model, cache, ids[:, :PROMPT])
    said = r"batch of 1.*got 2\. .*call cache\.batch_repeat_interleave\(2\) first"
    with pytest.raises(CacheMismatchError, match=said):
        generated(model, cache, ids, num_beams=2)
    cache.batch_repeat_interleave(2)
    assert generated(model, cache, ids, num_beams=2).shape == (1, PROMPT + 8)


def test_cache_is_refused_after_interrupted_forward_pass_until_reset(model):
    cache = CompressedCache(model, POLICY)
    broken = model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    with broken, pytest.raises(ZeroDivisionError):
        call(model, cache, random_ids(1, PROMPT))
    with pytest.raises(CacheMismatchError, match="interrupted"):
        call(model, cache, random_ids(1, 1))
    cache.reset()
    fresh = CompressedCache(model, POLICY)
    ids = random_ids(1, PROMPT)
    assert torch.equal(call(model, cache, ids), call(model, fresh, ids))


@pytest.mark.parametrize("tokens", [0, 2.5, PROMPT])
def test_expect_prompt_refuses_invalid_prompt_length(filled, tokens):
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match="prompt"):
        filled.expect_prompt(tokens)


_HEADS = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
_GROUPS = _HEADS | {"num_key_value_heads": 2}
REFUSED = {
    "all layers slide": ("mistral", _GROUPS | {"sliding_window": 16}, "at least one layer of full"),
    "no attention": ("mamba", {"hidden_size": 16, "state_size": 4}, "full attention"),
    "own attention": ("bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2}, "not go through"),
    "rearranged heads": ("diffllama", _GROUPS, "rearranges the keys and values"),
    "both directions": ("bert", _HEADS, "causal attention"),
    "encoder": ("t5", {"d_model": 16, "d_ff": 16}, "encoder-decoder T5ForConditionalGeneration"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_model_is_refused_by_class_name(case):
    family, changes, reason = REFUSED[case]
    small = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, **changes}
    kind = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(family, **small))
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        call(model.eval(), CompressedCache(model, POLICY), random_ids(1, PROMPT))
    assert type(model).__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel") in str(
        refusal.value
    )


def test_model_that_would_ignore_the_cache_is_refused():
    model = AutoModelForMaskedLM.from_config(
        AutoConfig.for_model("bert", vocab_size=VOCABULARY, num_hidden_layers=2, **_HEADS)
    )
    with pytest.raises(UnsupportedModelError, match="BertForMaskedLM, whose forward"):
        CompressedCache(model, POLICY)


class _PassingOn(LlamaModel):
    """A base model whose `forward` takes the cache in `**kwargs`, as some composite ones do."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


def test_base_model_that_passes_the_cache_on_by_keyword_is_compressed():
    model, ids = _PassingOn(tiny_config("llama")).eval(), random_ids(1, 60)
    cache = CompressedCache(model, POLICY)
    model(ids, past_key_values=cache)
    assert cache.report().kept_tokens == POLICY.budget


def test_attention_that_votes_cannot_reproduce_is_refused():
    """The scores would be wrong if the model changed its attention in an unknown way."""
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation(_twisted_attention())
    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention.*votes would be wrong"):
        call(model, CompressedCache(model, POLICY), random_ids(1, PROMPT))
    call(model, CompressedCache(model, FullCache()), random_ids(1, PROMPT))


def _twisted_attention() -> str:
    """Register an attention function that scales its queries without telling the cache."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module, query, *rest, **options):
        return sdpa_attention_forward(module, query * 1.5, *rest, **options)

    AttentionInterface.register("twisted", attend)
    AttentionMaskInterface.register("twisted", sdpa_mask)
    return "twisted"


def test_deep_copy_of_cache_shares_the_model(model, filled, monkeypatch):
    def refuse(*_):
        raise AssertionError("a parameter was copied")

    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", refuse)
    other = copy.deepcopy(filled)
    token = random_ids(2, 1, seed=5)
    assert torch.equal(call(model, other, token), call(model, filled, token))
    assert other.get_seq_length() == filled.get_seq_length() == PROMPT + 5


def test_model_without_caches_refuses_cache_of_another_model(model):
    cache, other = CompressedCache(model, POLICY), peaked_model(tiny_config("llama"), "sdpa")
    with pytest.raises(CacheMismatchError, match="of another model"):
        call(other, cache, random_ids(1, PROMPT))


def test_refused_forward_pass_leaves_no_state_in_cache(model):
    cache, other = CompressedCache(model, POLICY), copy.deepcopy(tiny_model("llama"))
    with pytest.raises(CacheMismatchError, match="a different LlamaAttention"):
        call(other, cache, random_ids(1, PROMPT))
    ids = random_ids(1, PROMPT + 40)
    fresh = CompressedCache(model, POLICY)
    assert torch.equal(call(model, cache, ids), call(model, fresh, ids))
    assert cache.report().kept_tokens == BUDGET


def test_wrapped_cache_cache_implementation_and_offloading_are_refused(model):
    cache, ids = CompressedCache(model, SnapKV(budget=20, window_size=8)), random_ids(1, 30)
    around = EncoderDecoderCache(cache, DynamicCache())
    with pytest.raises(InvalidArgumentError, match="Pass the CompressedCache directly"):
        model.generate(ids, past_key_values=around, max_new_tokens=2)
    beside = {"cache_implementation": "offloaded"}
    for options in (beside, {"generation_config": GenerationConfig(**beside)}):
        with pytest.raises(InvalidArgumentError, match=r"^cache_implementation: .*got 'offloaded'"):
            model.generate(ids, past_key_values=cache, **options)
    for move in (cache.offload, cache.prefetch):
        with pytest.raises(InvalidArgumentError, match=r"^offloading: .*recall='host'"):
            move(0, only_non_sliding=True)
    assert not cache.get_seq_length()
