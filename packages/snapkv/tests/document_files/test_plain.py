"""Which caches an engine can hold: what else was saved is refused, in a line that says why."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from snapkv import (
    H2O,
    CacheFileError,
    CacheMismatchError,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    KVzip,
    SnapKV,
    StreamingLLM,
)
from snapkv.cache.saving.files import read_sealed, write_sealed
from snapkv.document_files import read_document
from snapkv.hf.identity import identity_of
from snapkv.kvzip import read_context
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


UNFIT = {
    "recall": (POLICY, {"recall": "host"}, r"whose evicted tokens lie off the device \(recall\)"),
    "int8": (POLICY, {"quantize": "int8"}, r"whose tokens are held in int8 \(quantize\)"),
    "turns": (POLICY, {"turns": "compress"}, "which chooses again with every turn"),
    "query heads": (
        SnapKV(BUDGET, window_size=4, group_reduce="none"),
        {},
        "with sets of their own for 8 query heads",
    ),
    "sinks": (StreamingLLM(BUDGET), {}, "whose sinks were moved to other positions"),
    "h2o": (H2O(BUDGET), {}, "of h2o, which evicts while it generates"),
    "short": (SnapKV(200, window_size=4), {}, "of which snapkv has dropped nothing, and would"),
    "unknown": (Mine(BUDGET, window_size=4), {}, "of a method of this package, got .* of 'mine'"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_other_sets_than_plain_ones_are_refused(name, tmp_path):
    policy, options, said = UNFIT[name]
    cache = read(CompressedCache(LLAMA, policy, **options), IDS)
    cache.save(tmp_path / "one", beside={"input_ids": IDS})
    refused(tmp_path / "one", f"path: expected a saved cache .*{said}")


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


def test_rows_and_pads_are_refused(tmp_path):
    two = read(CompressedCache(LLAMA, POLICY), random_ids(2, TOKENS))
    two.save(tmp_path / "one", beside={"input_ids": IDS})
    refused(tmp_path / "one", "of 2 rows; save a cache of one row for every document")
    mask = torch.ones_like(IDS)
    whole = read(CompressedCache(LLAMA, POLICY), IDS, attention_mask=mask)
    whole.save(tmp_path / "one", beside={"input_ids": IDS})
    assert read_document(tmp_path / "one", model=IDENTITY).head_tokens.unique().tolist() == [BUDGET]
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


KEPT, KEYS = "layers.1.slots.kept", "layers.1.store.keys"


def changed_tensor(name, change):
    def forge(tensors, notes):
        tensors[name] = change(tensors[name])

    return forge


def changed_notes(**changes):
    return lambda tensors, notes: notes.update(changes)


def changed_layer(**changes):
    return lambda tensors, notes: notes["layers"][1].update(changes)


def with_nan(keys):
    keys[0, 0, 3, 1] = float("nan")
    return keys


FORGED = {
    "positions twice": changed_tensor(KEPT, lambda kept: kept // 2),
    "positions behind the end": changed_tensor(KEPT, lambda kept: kept + 1),
    "no numbers": changed_tensor(KEYS, with_nan),
    "another dtype": changed_tensor(KEYS, lambda keys: keys.half()),
    "keys without width": changed_tensor(KEYS, lambda keys: keys[..., :0]),
    "keys of fewer tokens": changed_tensor(KEYS, lambda keys: keys[:, :, 1:]),
    "no layers": changed_notes(layers=[]),
    "a layer that has seen more": lambda _, notes: notes["layers"][1]["slots"].update(start=71),
    "another kind of store": changed_layer(store_kind="another"),
    "options that are text": changed_notes(options="none"),
}


@pytest.mark.parametrize("change", FORGED)
def test_sealed_nonsense_is_refused(change, good, tmp_path):
    tensors, notes, *_ = read_sealed(good)
    FORGED[change](tensors, notes)
    write_sealed(tmp_path / "forged", tensors, notes)
    refused(tmp_path / "forged", "forged', whose parts do not fit", kind=CacheFileError)


def test_what_is_damaged_or_no_cache_or_sealed_with_a_policy_that_cannot_be(good, tmp_path):
    refused(tmp_path / "none", "got no file at", kind=CacheFileError)
    save_file({"weights": torch.ones(3)}, tmp_path / "weights")
    refused(tmp_path / "weights", "its header is not one of a saved cache", kind=CacheFileError)
    (tmp_path / "cut").write_bytes(good.read_bytes()[:-1])
    refused(tmp_path / "cut", "path: expected a cache that", kind=CacheFileError)
    tensors, notes, *_ = read_sealed(good)
    notes["policy"]["window_size"] = BUDGET
    write_sealed(tmp_path / "forged", tensors, notes)
    refused(tmp_path / "forged", "budget: expected more than window_size")


# Bounds.


def test_a_larger_file_is_refused_before_it_is_read(good, tmp_path):
    size = good.stat().st_size
    assert (
        read_document(good, model=IDENTITY, most_bytes=size).head_tokens.tolist()
        == [[BUDGET] * 2] * 4
    )
    (tmp_path / "junk").write_bytes(bytes(size))
    for path in (good, tmp_path / "junk"):
        with pytest.raises(CacheFileError, match="expected a saved cache of at most 0 B, got"):
            read_document(path, model=IDENTITY, most_bytes=0)
    with pytest.raises(CacheFileError, match="expected a saved cache of at most"):
        read_document(good, model=IDENTITY, most_bytes=size - 1)


def packed(path):
    """A file of int4 whose keys and values take more than it does."""
    ids = random_ids(1, 400)
    cache = read(CompressedCache(LLAMA, FullCache()), ids)
    cache.save(path, beside={"input_ids": ids}, bits="int4")
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
    name = "layers.0.store.states.codes.0.scale"
    tensors[name] = functional.pad(tensors[name][None], (0, 0) * 2 + (0, 99))
    write_sealed(tmp_path / "forged", tensors, notes)
    refused(tmp_path / "forged", "whose parts do not fit together.*shape", kind=CacheFileError)


@pytest.mark.parametrize("counts", [[10**15, 396], [-(10**9), 10**9 + 792], [396], [396.0, 396]])
def test_no_count_makes_packed_numbers_more(tmp_path, counts):
    packed(tmp_path / "one")
    tensors, notes, *_ = read_sealed(tmp_path / "one")
    notes["layers"][0]["store"]["states"]["parts"]["sections"] = [[counts]]
    write_sealed(tmp_path / "forged", tensors, notes)
    refused(tmp_path / "forged", "whose parts do not fit together", kind=CacheFileError)
