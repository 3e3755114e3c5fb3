"""Which caches an engine can hold: what else was saved is refused, in a line that says why."""

import os
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from snapkv import (
    H2O,
    AdaKV,
    CacheFileError,
    CacheMismatchError,
    CompressedCache,
    Document,
    FullCache,
    InvalidArgumentError,
    KVzip,
    PyramidKV,
    SnapKV,
    StreamingLLM,
)
from snapkv.cache.saving.files import read_sealed, write_sealed
from snapkv.document_files import read_document
from snapkv.hf import saved
from snapkv.hf.identity import identity_of
from snapkv.kvzip import read_context
from tests.cache.test_saving import damaged_files
from tests.families import random_ids, tiny_model

TOKENS, BUDGET = 70, 32
POLICY = SnapKV(BUDGET, window_size=4)
LLAMA = tiny_model("llama")
IDENTITY = identity_of(LLAMA)
IDS = random_ids(1, TOKENS)


def read(cache, ids, **options):
    with torch.no_grad():
        cache.model(ids, past_key_values=cache, **options)
    return cache


def refused(path, said, model=IDENTITY, kind=InvalidArgumentError):
    with pytest.raises(kind, match=said) as raised:
        read_document(path, model=model)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


@dataclass(frozen=True)
class Mine(SnapKV):
    """A method that is not one of the package's."""

    name: ClassVar[str] = "mine"


OPTIONS = {
    "recall": ({"recall": "host"}, r"whose evicted tokens lie off the device \(recall\)"),
    "int8": ({"quantize": "int8"}, r"whose tokens are held in int8 \(quantize\)"),
    "turns": ({"turns": "compress"}, "which chooses again with every turn"),
}
POLICIES = {
    "ragged": (AdaKV(POLICY), "whose heads keep different numbers of tokens in layer 0"),
    "pyramid": (
        PyramidKV(BUDGET, window_size=4),
        "whose layers keep different numbers of tokens, from 5 to 59",
    ),
    "query heads": (
        SnapKV(BUDGET, window_size=4, group_reduce="none"),
        "with sets of their own for 8 query heads",
    ),
    "sinks": (StreamingLLM(BUDGET), "whose sinks were moved to other positions"),
    "recent": (
        StreamingLLM(BUDGET, positions="original"),
        "of streaming-llm, which evicts while it generates",
    ),
    "h2o": (H2O(BUDGET), "of h2o, which evicts while it generates"),
    "short": (
        SnapKV(200, window_size=4),
        "of which snapkv has dropped nothing, and would choose with the next prompt",
    ),
    "unknown": (Mine(BUDGET, window_size=4), "of a method of this package, got .* of 'mine'"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_cache_made_with_other_options_is_refused(name, tmp_path):
    options, said = OPTIONS[name]
    cache = read(CompressedCache(LLAMA, POLICY, **options), IDS)
    cache.save(tmp_path / "one", beside={"input_ids": IDS})
    refused(tmp_path / "one", f"path: expected a saved cache that an engine can hold, .*{said}")


@pytest.mark.parametrize("name", POLICIES)
def test_other_sets_than_plain_ones_are_refused(name, tmp_path):
    policy, said = POLICIES[name]
    cache = read(CompressedCache(LLAMA, policy), IDS)
    cache.save(tmp_path / "one", beside={"input_ids": IDS})
    refused(tmp_path / "one", f"path: expected a saved cache .*{said}")


def test_a_document_of_the_library_says_that_its_tokens_are_off_the_device(tmp_path):
    Document(LLAMA, IDS, POLICY).save(tmp_path / "one")
    refused(tmp_path / "one", r"\(recall\); save one that was made without recall")


def test_layers_of_another_kind_are_refused(tmp_path):
    model = tiny_model("gemma3_text")
    cache = read(CompressedCache(model, POLICY), IDS)
    cache.save(tmp_path / "one", beside={"input_ids": IDS})
    said = "whose layer 0 is a DynamicSlidingWindowLayer"
    refused(tmp_path / "one", said, model=identity_of(model))


def test_what_has_read_other_than_one_prompt_is_refused(tmp_path):
    cache, path = CompressedCache(LLAMA, POLICY), tmp_path / "one"
    cache.save(path, beside={"input_ids": IDS})
    refused(path, "which has read nothing")
    cache.expect_prompt(TOKENS)
    read(cache, IDS[:, :50])
    cache.save(path, beside={"input_ids": IDS[:, :50]})
    refused(path, "has seen 50 tokens, of which the last prompt are those from 0 to 70")
    read(cache, IDS[:, 50:])
    cache.save(path, beside={"input_ids": IDS})
    assert len(read_document(path, model=IDENTITY).token_ids) == TOKENS
    cache = CompressedCache(LLAMA, POLICY)
    longer = LLAMA.generate(IDS, past_key_values=cache, max_new_tokens=5, do_sample=False)
    cache.save(path, beside={"input_ids": longer[:, :-1]})
    refused(path, "has seen 74 tokens, .* from 0 to 70; save it right behind its first prompt")
    cache.expect_prompt(84)
    read(cache, random_ids(1, 10))
    cache.save(path, beside={"input_ids": random_ids(1, 84)})
    refused(path, "has seen 84 tokens, of which the last prompt are those from 74 to 84")


def test_everything_kept_and_a_token_more_is_refused_too(tmp_path):
    cache = read(CompressedCache(LLAMA, FullCache()), IDS)
    read(cache, IDS[:, :1])
    cache.save(tmp_path / "one", beside={"input_ids": IDS})
    refused(tmp_path / "one", "has seen 71 tokens, of which the last prompt are those from 0 to 70")


def test_rows_and_pads_are_refused(tmp_path):
    two = read(CompressedCache(LLAMA, POLICY), random_ids(2, TOKENS))
    two.save(tmp_path / "one", beside={"input_ids": IDS})
    refused(tmp_path / "one", "of 2 rows; save a cache of one row for every document")
    mask = torch.ones_like(IDS)
    whole = read(CompressedCache(LLAMA, POLICY), IDS, attention_mask=mask)
    whole.save(tmp_path / "one", beside={"input_ids": IDS})
    assert read_document(tmp_path / "one", model=IDENTITY).kept.shape == (4, 2, BUDGET)
    mask[:, :3] = 0
    padded = read(CompressedCache(LLAMA, POLICY), IDS, attention_mask=mask)
    padded.save(tmp_path / "one", beside={"input_ids": IDS})
    refused(tmp_path / "one", "of a prompt with pads; read the document without padding")


def test_the_token_ids_must_be_those_that_were_read(tmp_path):
    cache, path = read(CompressedCache(LLAMA, POLICY), IDS), tmp_path / "one"
    cache.save(path)
    refused(path, "without the token ids that it has read; save it with cache.save")
    cache.save(path, beside={"input_ids": IDS[:, 1:]})
    refused(path, "with 69 token ids for 70 tokens")
    cache.save(path, beside={"input_ids": IDS.view(2, 35)})
    refused(path, "with token ids of 2 rows")
    for wrong in (IDS.float(), -IDS):
        cache.save(path, beside={"input_ids": wrong})
        refused(path, "do not fit together.*token ids of", kind=CacheFileError)


def test_another_model_or_dtype_is_refused(tmp_path):
    cache = read(CompressedCache(LLAMA, POLICY), IDS)
    cache.save(tmp_path / "one", beside={"input_ids": IDS})
    for change, said in (
        ({"dtype": "bfloat16"}, "dtype float32.*got dtype bfloat16"),
        ({"class": "Other"}, "class LlamaForCausalLM.*got class Other"),
        ({"weights": "0"}, "a LlamaForCausalLM with other weights"),
    ):
        refused(tmp_path / "one", said, model=IDENTITY | change, kind=CacheMismatchError)


# Files that were changed, by accident or not.


@pytest.fixture
def good(tmp_path):
    cache = read_context(LLAMA, IDS, KVzip(BUDGET, window_size=4))
    cache.save(tmp_path / "good", beside={"input_ids": IDS})
    return tmp_path / "good"


def test_damaged_files_are_refused(good, tmp_path):
    other = read(CompressedCache(LLAMA, POLICY), IDS[:, 5:])
    other.save(tmp_path / "other", beside={"input_ids": IDS[:, 5:]})
    whole, tried = good.read_bytes(), 0
    for _, content in damaged_files(whole, (tmp_path / "other").read_bytes()):
        if content != whole:
            (tmp_path / "spoilt").write_bytes(content)
            refused(tmp_path / "spoilt", "path: expected a cache that", kind=CacheFileError)
            tried += 1
    assert tried >= 100


def test_other_files_and_no_files_are_refused(tmp_path):
    refused(tmp_path / "none", "got no file at", kind=CacheFileError)
    refused(tmp_path, "it is no|path: expected a cache that", kind=CacheFileError)
    save_file({"weights": torch.ones(3)}, tmp_path / "weights")
    refused(tmp_path / "weights", "its header is not one of a saved cache", kind=CacheFileError)
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "it is no regular file", kind=CacheFileError)


def forged_tensors(change, tensors):
    kept, keys = "layers.1.slots.kept", "layers.1.store.keys"
    if change == "positions twice":
        tensors[kept] = tensors[kept] // 2
    elif change == "positions backwards":
        tensors[kept] = tensors[kept].flip(-1)
    elif change == "positions behind the end":
        tensors[kept] = tensors[kept] + 1
    elif change == "no numbers":
        tensors[keys][0, 0, 3, 1] = float("nan")
    elif change == "another dtype":
        tensors[keys] = tensors[keys].half()
    elif change == "keys without width":
        tensors[keys] = tensors[keys][..., :0]
    else:
        assert change == "keys of fewer tokens"
        tensors[keys] = tensors[keys][:, :, 1:]


def forged_notes(change, notes):
    layer = notes["layers"][1]
    if change == "no layers":
        notes["layers"] = []
    elif change == "a layer that has seen more":
        layer["slots"]["start"] += 1
    elif change == "another kind of store":
        layer["store_kind"] = "quantized"
    elif change == "packed with an unknown dtype":
        notes["packed"] = {"layers.0.store.keys": {"shape": [1], "dtype": "load"}}
    elif change == "a policy that cannot be":
        notes["policy"]["window_size"] = BUDGET
    else:
        assert change == "options that are text"
        notes["options"] = "none"


FORGED = {
    "positions twice": forged_tensors,
    "positions backwards": forged_tensors,
    "positions behind the end": forged_tensors,
    "no numbers": forged_tensors,
    "another dtype": forged_tensors,
    "keys without width": forged_tensors,
    "keys of fewer tokens": forged_tensors,
    "no layers": forged_notes,
    "a layer that has seen more": forged_notes,
    "another kind of store": forged_notes,
    "packed with an unknown dtype": forged_notes,
    "options that are text": forged_notes,
}


@pytest.mark.parametrize("change", FORGED)
def test_sealed_nonsense_is_refused(change, good, tmp_path):
    tensors, notes, *_ = read_sealed(good)
    FORGED[change](change, tensors if FORGED[change] is forged_tensors else notes)
    write_sealed(tmp_path / "forged", tensors, notes)
    refused(tmp_path / "forged", "forged', whose parts do not fit", kind=CacheFileError)


def test_a_sealed_policy_that_cannot_be_is_refused(good, tmp_path):
    tensors, notes, *_ = read_sealed(good)
    forged_notes("a policy that cannot be", notes)
    write_sealed(tmp_path / "forged", tensors, notes)
    refused(tmp_path / "forged", "budget: expected more than window_size")


# Bounds.


def test_a_larger_file_is_refused_before_it_is_read(good, tmp_path):
    size = good.stat().st_size
    assert read_document(good, model=IDENTITY, most_bytes=size).kept.shape == (4, 2, BUDGET)
    (tmp_path / "junk").write_bytes(bytes(size))
    for path in (good, tmp_path / "junk"):
        with pytest.raises(
            CacheFileError, match="path: expected a saved cache of at most 0 B, got"
        ):
            read_document(path, model=IDENTITY, most_bytes=0)
    with pytest.raises(CacheFileError, match="expected a saved cache of at most"):
        read_document(good, model=IDENTITY, most_bytes=size - 1)


def packed(path):
    """A file of int4 whose keys and values take more than it does."""
    ids = random_ids(1, 400)
    cache = read(CompressedCache(LLAMA, FullCache()), ids)
    saved.write(cache, cache.options, path, {"input_ids": ids}, "int4")
    return 4 * 2 * 2 * 400 * 8 * 4


def test_a_packed_file_is_refused_by_what_it_spreads_out_to(tmp_path):
    spread, path = packed(tmp_path / "one"), tmp_path / "one"
    assert path.stat().st_size < spread
    assert len(read_document(path, model=IDENTITY, most_bytes=spread).token_ids) == 400
    with pytest.raises(CacheFileError, match=r"at most .* in the model's dtype, got"):
        read_document(path, model=IDENTITY, most_bytes=spread - 1)


def test_no_scale_makes_packed_numbers_more(tmp_path):
    packed(tmp_path / "one")
    tensors, notes, *_ = read_sealed(tmp_path / "one")
    name = "layers.0.store.keys.scale"
    tensors[name] = functional.pad(tensors[name][None], (0, 0) * 5 + (0, 99))
    write_sealed(tmp_path / "forged", tensors, notes)
    refused(tmp_path / "forged", "whose parts do not fit together.*shape", kind=CacheFileError)
