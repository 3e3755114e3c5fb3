"""What cannot be joined is refused by name, before any work."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from snapkv import (
    H2O,
    TOVA,
    CacheMismatchError,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    InvalidTypeError,
    KVzip,
    PromptTooLongError,
    SnapKV,
    StreamingLLM,
    UnsupportedModelError,
)
from snapkv.library import Part, blend, joined_ids
from tests.families import random_ids, tiny_config, tiny_model
from tests.library.reference import read_part
from tests.library.test_blending import documents, few
from tests.library.test_going_on import parts_of


def refuses(kind, match, model, parts, *args, **options):
    def read(*_, **__):
        raise AssertionError("the model was asked")

    vars(model)["forward"] = read
    decoder = model.get_decoder()
    vars(decoder)["forward"] = read
    try:
        with pytest.raises(kind, match=match):
            blend(model, parts, *args, **options)
    finally:
        del vars(model)["forward"], vars(decoder)["forward"]


@pytest.mark.parametrize(
    ("share", "kind"),
    [
        (-0.1, InvalidArgumentError),
        (float("nan"), InvalidArgumentError),
        (1.1, InvalidArgumentError),
        ("0.1", InvalidTypeError),
        (True, InvalidTypeError),
    ],
)
def test_a_fraction_is_a_number_between_none_and_all(share, kind):
    model = tiny_model("llama")
    parts = parts_of(model, "whole")
    refuses(kind, r"recompute: expected a number in \[0, 1\]", model, parts, recompute=share)


def test_there_are_parts():
    model = tiny_model("llama")
    refuses(InvalidArgumentError, "parts: expected at least one document", model, [])
    refuses(InvalidTypeError, "parts: expected documents as snapkv.library.Part", model, ["text"])
    with pytest.raises(InvalidArgumentError, match="parts: expected at least one"):
        joined_ids([])


def test_parts_that_do_not_stand_together():
    model, other, hybrid = (tiny_model(each) for each in ("llama", "qwen3", "cohere2"))
    parts = [*parts_of(model, "whole", (5,)), *parts_of(other, "whole", (5,))]
    refuses(CacheMismatchError, "LlamaForCausalLM.*Qwen3ForCausalLM.*part 1", model, parts)
    own = read_part(model, random_ids(1, 9, seed=3), 3)
    parts = [*documents(model, (5, 6), prefix_tokens=3), own]
    refuses(CacheMismatchError, "same prefix of 3 tokens, got another one in part 2", model, parts)
    parts = parts_of(model, "whole", (300, 213))
    refuses(PromptTooLongError, "at most 512 tokens together.*got 513", model, parts)
    parts = parts_of(hybrid, "whole", (5, 6))
    refuses(UnsupportedModelError, "full attention in every layer", hybrid, parts)


def test_keys_that_cannot_be_turned():
    latent = tiny_model("deepseek_v3")
    parts = parts_of(latent, "whole", (5, 6))
    with pytest.raises(UnsupportedModelError, match=r"latent.*; read .* with recompute=1"):
        blend(latent, parts)
    assert blend(latent, parts, recompute=1).get_seq_length() == 11
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = tiny_config("llama", rope_parameters=rope)
    dynamic = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="depend on the text's length"):
        blend(dynamic, parts_of(dynamic, "whole", (5, 6)))


def test_attention_that_takes_no_masks(monkeypatch):
    model = tiny_model("llama")
    parts = parts_of(model, "whole", (5, 6))
    monkeypatch.setattr("snapkv.library.recomputing.IMPLEMENTATIONS", ("eager",))
    refuses(UnsupportedModelError, "expected eager where.*got 'sdpa'", model, parts, recompute=0.5)
    assert blend(model, parts, recompute=0).get_seq_length() == 11


@pytest.mark.parametrize(
    ("kind", "policy", "match"),
    [
        ("whole", H2O(16), "policy: expected one whose last queries vote"),
        ("whole", KVzip(16, window_size=4), "policy: expected one that chooses when a layer"),
        ("even", SnapKV(keep_ratio=0.5), "policy: expected a method with a budget"),
        ("uneven", TOVA(16), "policy: expected one that only compresses prompts"),
    ],
)
def test_policies_that_do_not_go_with_what_is_held(kind, policy, match):
    model = tiny_model("llama")
    parts = parts_of(model, kind)
    blend(model, parts, recompute=0)  # from now on it is known how keys turn
    refuses(InvalidArgumentError, match, model, parts, policy)


@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_options_that_do_not_go_with_what_is_held(kind):
    model, policy = tiny_model("llama"), SnapKV(16, window_size=4)
    parts = parts_of(model, kind)
    blend(model, parts, recompute=0)
    options = {"protect": [(0, 3)], "recall": "host"}
    if kind == "uneven":
        options |= {"turns": "compress", "quantize": "int8", "storage": "static"}
    for name, value in options.items():
        given = {name: value}
        refuses(InvalidArgumentError, f"{name}: expected", model, parts, policy, **given)


def test_a_part_is_what_its_cache_has_read():
    model, ids = tiny_model("llama"), random_ids(1, 9)
    cache = read_part(model, ids, 0).cache
    with pytest.raises(CacheMismatchError, match="8 tokens of input_ids, got 9 seen"):
        Part(input_ids=ids[:, :8], cache=cache)
    with pytest.raises(InvalidArgumentError, match="a prefix of 9"):
        Part(input_ids=ids, cache=cache, prefix_tokens=9)
    with pytest.raises(InvalidTypeError, match="input_ids: expected a tensor of integers"):
        Part(input_ids=ids.float(), cache=cache)
    with pytest.raises(InvalidTypeError, match="cache: expected a CompressedCache"):
        Part(input_ids=ids, cache=None)
    with pytest.raises(InvalidTypeError, match="prefix_tokens"):
        Part(input_ids=ids, cache=cache, prefix_tokens="3")


def test_parts_that_do_not_hold_their_tokens_where_they_stood():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    with pytest.raises(InvalidArgumentError, match="keys and values on the device"):
        read_part(model, ids, 0, few(), recall="host")
    with pytest.raises(InvalidArgumentError, match="sinks were moved"):
        read_part(model, ids, 0, StreamingLLM(8))
    grouped = SnapKV(8, window_size=2, group_reduce="none")
    refuses(InvalidArgumentError, "one set of tokens per KV head.*part 0", model,
            [read_part(model, ids, 0, grouped)])  # fmt: skip
    padded = CompressedCache(model, FullCache())
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=padded)
    with pytest.raises(CacheMismatchError, match="without padding"):
        Part(input_ids=ids, cache=padded)
