"""What an engine reads of a library's document is what was kept; anything else is refused."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from snapkv import (
    H2O,
    AdaKV,
    CacheFileError,
    CacheMismatchError,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    KeyDiff,
    KVzip,
    ModelNotFoundError,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    UnsupportedModelError,
)
from snapkv.app.models import place_of
from snapkv.cache.saving.files import read_sealed, seal_of, write_sealed
from snapkv.hf.identity import identity_of
from snapkv.kvzip import read_context
from snapkv.library.stored import model_identity, read_document
from tests.families import call, random_ids, tiny_config, tiny_model

TOKENS, BUDGET = 70, 32
POLICY = SnapKV(BUDGET, window_size=4)
LLAMA = tiny_model("llama")
IDENTITY = identity_of(LLAMA)
IDS = random_ids(1, TOKENS)


def read(cache, ids=IDS, **options):
    call(cache.model, cache, ids, **options)
    return cache


def refused(path, said, model=IDENTITY, kind=InvalidArgumentError):
    with pytest.raises(kind, match=said) as raised:
        read_document(path, model=model)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


KEPT_BY = {
    "snapkv": (POLICY, {}),
    "protected": (POLICY, {"protect": [(0, 9)]}),
    "keydiff": (KeyDiff(BUDGET, window_size=4), {}),
    "full": (FullCache(), {}),
    "adakv": (AdaKV(POLICY), {}),
    "pyramidkv": (PyramidKV(BUDGET, window_size=4), {}),
    "short": (SnapKV(200, window_size=4), {}),
}
READ = [
    *(("llama", policy, None) for policy in KEPT_BY),
    *((family, "snapkv", None) for family in ("phi3", "glm4", "mixtral", "deepseek_v3")),
    *(("llama", "adakv", bits) for bits in ("int8", "int4", "K8V4")),
]


@pytest.mark.parametrize(("family", "policy", "bits"), READ)
def test_an_engine_reads_of_a_file_what_the_library_loads_of_it(family, policy, bits, tmp_path):
    model, path = tiny_model(family), tmp_path / "one"
    policy, options = KEPT_BY[policy]
    cache = read(CompressedCache(model, policy, **options))
    cache.save(path, beside={"input_ids": IDS}, bits=bits)
    document = read_document(path, model=identity_of(model), seal=seal_of(path))
    assert torch.equal(document.token_ids, IDS[0])
    assert {document.token_ids.dtype, *(kept.dtype for kept in document.kept)} == {torch.int64}
    for index, layer in enumerate(CompressedCache.load(path, model).layers):
        held = document.kept[index] >= 0
        assert torch.equal(document.kept[index], cache.kept_positions(index)[0])
        assert torch.equal(document.head_tokens[index], held.sum(dim=-1))
        keys, values = layer.store.padded()
        assert torch.equal(document.keys[index][held], keys[0][held])
        assert torch.equal(document.values[index][held], values[0][held])


@dataclass(frozen=True)
class Mine(SnapKV):
    """A method that is not one of the package's."""

    name: ClassVar[str] = "mine"


UNLIKE = "made with recall, quantize or turns, as no library makes one"
QUERY_HEADS = SnapKV(BUDGET, window_size=4, group_reduce="none")
UNFIT = {
    "recall": (POLICY, {"recall": "host"}, UNLIKE),
    "int8": (POLICY, {"quantize": "int8"}, UNLIKE),
    "turns": (POLICY, {"turns": "compress"}, UNLIKE),
    "query heads": (QUERY_HEADS, {}, "with sets of their own for 8 query heads"),
    "sinks": (StreamingLLM(BUDGET), {}, "whose sinks were moved to other positions"),
    "h2o": (H2O(BUDGET), {}, "of h2o, which evicts while it generates"),
    "unknown": (Mine(BUDGET, window_size=4), {}, "of 'mine', no method of this package"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_other_sets_than_a_librarys_are_refused(name, tmp_path):
    policy, options, said = UNFIT[name]
    cache = read(CompressedCache(LLAMA, policy, **options))
    cache.save(tmp_path / "one", beside={"input_ids": IDS})
    refused(tmp_path / "one", f"path: expected a saved cache .*{said}; register the document's")


def test_layers_of_another_kind_are_refused(tmp_path):
    model = tiny_model("gemma3_text")
    cache = read(CompressedCache(model, POLICY))
    cache.save(tmp_path / "one", beside={"input_ids": IDS})
    said = "whose layer 0 is a DynamicSlidingWindowLayer"
    refused(tmp_path / "one", said, model=identity_of(model))


def test_what_has_read_other_than_one_prompt_of_one_row_is_refused(tmp_path):
    cache, path = CompressedCache(LLAMA, POLICY), tmp_path / "one"
    cache.save(path, beside={"input_ids": IDS})
    refused(path, "which has seen 0 tokens")
    cache.expect_prompt(TOKENS)
    read(cache, IDS[:, :50])
    cache.save(path, beside={"input_ids": IDS[:, :50]})
    refused(path, "which has seen 50 tokens, and not as one prompt")
    cache = CompressedCache(LLAMA, POLICY)
    longer = LLAMA.generate(IDS, past_key_values=cache, max_new_tokens=5, do_sample=False)
    cache.save(path, beside={"input_ids": longer[:, :-1]})
    refused(path, "which has seen 74 tokens, and not as one prompt")
    read(CompressedCache(LLAMA, POLICY), random_ids(2, TOKENS)).save(
        path, beside={"input_ids": IDS}
    )
    refused(path, "of several rows, or of a prompt with pads")
    mask = torch.ones_like(IDS)
    mask[:, :3] = 0
    padded = read(CompressedCache(LLAMA, POLICY), attention_mask=mask)
    padded.save(path, beside={"input_ids": IDS})
    refused(path, "of several rows, or of a prompt with pads")


def test_the_token_ids_must_be_those_that_were_read(tmp_path):
    cache, path = read(CompressedCache(LLAMA, POLICY)), tmp_path / "one"
    cache.save(path)
    refused(path, "without the token ids of the row that it has read")
    for other in (IDS[:, 1:], IDS.view(2, 35)):
        cache.save(path, beside={"input_ids": other})
        refused(path, "without the token ids of the row that it has read")
    for wrong in (IDS.float(), -IDS):
        cache.save(path, beside={"input_ids": wrong})
        refused(path, "do not fit together.*token ids of", kind=CacheFileError)


def test_another_model_or_dtype_is_refused(tmp_path):
    cache = read(CompressedCache(LLAMA, POLICY))
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


# Whose it is.


def save(model, folder):
    """A folder as vLLM is given one."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place_of("demo")).save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        ("llama", {}, "float32"),
        ("llama", {"tie_word_embeddings": True}, "bfloat16"),
        ("qwen3_moe", {}, "float32"),
        ("phi3", {}, "bfloat16"),
        ("gemma2", {}, "float32"),
        ("deepseek_v3", {}, "bfloat16"),
        ("gpt_oss", {}, "float32"),
    ],
    ids=str,
)
def test_a_folder_says_which_model_it_is(family, changes, dtype, tmp_path):
    """Tied weights, and such as transformers saves by other names than it has them under."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).float()
    save(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    assert model_identity(tmp_path, dtype) == identity_of(loaded)
    if dtype == "float32":
        assert model_identity(tmp_path, dtype)["weights"] == identity_of(model)["weights"]


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"model: expected a folder with a config\.json"):
        model_identity(tmp_path, "float32")


def test_keys_that_depend_on_the_texts_length_are_no_files(tmp_path):
    """transformers goes by the length of the text, vLLM by the longest that it serves."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    save(AutoModelForCausalLM.from_config(tiny_config("llama", rope_parameters=rope)), tmp_path)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM with rope_type 'dynamic'"):
        model_identity(tmp_path, "float32")
