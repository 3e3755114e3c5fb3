"""Parts that cannot be joined are refused by name before the model runs."""

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
    default_policy,
)
from snapkv_app.library import Part, blend, joined_ids
from tests.families import call, random_ids, tiny_config, tiny_model
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


LLAMA, HYBRID = tiny_model("llama"), tiny_model("cohere2")
SMALL = SnapKV(16, window_size=4)


def of(kind, *lengths, model=LLAMA):
    """Documents of which all is held, or as much in every head, or not."""
    return lambda: parts_of(model, kind, *([lengths] if lengths else []))


def of_two_models():
    return [*of("whole", 5)(), *parts_of(tiny_model("qwen3"), "whole", (5,))]


def of_two_prefixes():
    return [
        *documents(LLAMA, (5, 6), prefix_tokens=3),
        read_part(LLAMA, random_ids(1, 9, seed=3), 3),
    ]


def of_query_heads():
    grouped = SnapKV(8, window_size=2, group_reduce="none")
    return [read_part(LLAMA, random_ids(1, 20), 0, grouped)]


ARGUMENT, TYPE, MISMATCH = InvalidArgumentError, InvalidTypeError, CacheMismatchError
BLENDS = [
    (ARGUMENT, r"recompute: expected a number in \[0, 1\]", of("whole"), {"recompute": 1.1}),
    (ARGUMENT, "parts: expected at least one document", list, {}),
    (TYPE, "parts: expected a list of Part objects", lambda: ["text"], {}),
    (MISMATCH, "LlamaForCausalLM.*part 1.*Qwen3ForCausalLM", of_two_models, {}),
    (MISMATCH, "part 2 does not begin with the prefix of 3 tokens", of_two_prefixes, {}),
    (ARGUMENT, "per query head in part 0", of_query_heads, {}),
    (PromptTooLongError, "the documents have 513 tokens.*512 positions", of("whole", 300, 213), {}),
    (UnsupportedModelError, "do not have full attention", of("whole", 5, 6, model=HYBRID), {}),
    (ARGUMENT, "policy: .* the queries of the whole prompt", of("whole"), {"policy": H2O(16)}),
    (ARGUMENT, "policy: .* prompt that is read only once", of("whole"),
     {"policy": KVzip(16, window_size=4)}),
    (ARGUMENT, "policy: the documents were compressed", of("even"),
     {"policy": SnapKV(keep_ratio=0.5)}),
    (ARGUMENT, "policy: the documents were compressed", of("even"),
     {"policy": default_policy(64)}),
    (ARGUMENT, "policy: the method tova evicts after every token.* Use SnapKV", of("uneven"),
     {"policy": TOVA(16)}),
    *[
        (ARGUMENT, f"{name}: expected", of(kind), {"policy": SMALL, name: value})
        for kind in ("even", "uneven")
        for name, value in (("protect", [(0, 3)]), ("recall", "host"))
    ],
    *[
        (ARGUMENT, f"{name}: expected", of("uneven"), {"policy": SMALL, name: value})
        for name, value in (("turns", "compress"), ("quantize", "int8"))
    ],
]  # fmt: skip


@pytest.mark.parametrize(("kind", "match", "make", "options"), BLENDS)
def test_invalid_parts_are_refused_before_the_model_runs(kind, match, make, options):
    blend(LLAMA, of("whole")(), recompute=0)  # from now on it is known how keys turn
    parts = make()
    model = parts[0].cache.model if "full attention" in match else LLAMA
    refuses(kind, match, model, parts, **options)
    if not parts:
        with pytest.raises(kind, match=match):
            joined_ids(parts)


def test_keys_that_cannot_be_rotated_are_refused():
    latent = tiny_model("deepseek_v3")
    parts = parts_of(latent, "whole", (5, 6))
    with pytest.raises(UnsupportedModelError, match=r"latent.*\. Read .* with recompute=1"):
        blend(latent, parts)
    assert blend(latent, parts, recompute=1).get_seq_length() == 11
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = tiny_config("llama", rope_parameters=rope)
    dynamic = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="depends on the length of the text"):
        blend(dynamic, parts_of(dynamic, "whole", (5, 6)))


def test_attention_without_masks_is_refused(monkeypatch):
    model = tiny_model("llama")
    parts = parts_of(model, "whole", (5, 6))
    monkeypatch.setattr("snapkv_app.library.recomputing.IMPLEMENTATIONS", ("eager",))
    refuses(
        UnsupportedModelError,
        "must be eager to recompute.*got 'sdpa'",
        model,
        parts,
        recompute=0.5,
    )
    assert blend(model, parts, recompute=0).get_seq_length() == 11


def test_part_needs_the_tokens_that_its_cache_has_read():
    model, ids = tiny_model("llama"), random_ids(1, 9)
    cache = read_part(model, ids, 0).cache
    with pytest.raises(
        CacheMismatchError, match="the cache has read 9 tokens, but input_ids has 8"
    ):
        Part(input_ids=ids[:, :8], cache=cache)
    with pytest.raises(InvalidArgumentError, match="a prefix of 9"):
        Part(input_ids=ids, cache=cache, prefix_tokens=9)
    with pytest.raises(InvalidTypeError, match="input_ids: expected a tensor of integers"):
        Part(input_ids=ids.float(), cache=cache)
    with pytest.raises(InvalidTypeError, match="cache: expected a CompressedCache"):
        Part(input_ids=ids, cache=None)
    with pytest.raises(InvalidTypeError, match="prefix_tokens"):
        Part(input_ids=ids, cache=cache, prefix_tokens="3")


def test_parts_with_moved_tokens_are_refused():
    model, ids = tiny_model("llama"), random_ids(1, 20)
    with pytest.raises(InvalidArgumentError, match="keys and values on the device"):
        read_part(model, ids, 0, few(), recall="host")
    with pytest.raises(InvalidArgumentError, match="has moved the keys of the attention sinks"):
        read_part(model, ids, 0, StreamingLLM(8))
    padded = CompressedCache(model, FullCache())
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    call(model, padded, ids, attention_mask=mask)
    with pytest.raises(CacheMismatchError, match="without padding"):
        Part(input_ids=ids, cache=padded)
