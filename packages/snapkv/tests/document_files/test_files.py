"""A document's file is the one that the library writes, and gives back what was put into it."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from snapkv import (
    AdaKV,
    CompressedCache,
    ExpectedAttention,
    FullCache,
    InvalidArgumentError,
    KeyDiff,
    KVzip,
    ModelNotFoundError,
    PyramidKV,
    SnapKV,
    document_files,
)
from snapkv.app.models import place_of
from snapkv.cache.saving.files import read_sealed, seal_of
from snapkv.document_files import StoredDocument, model_identity, read_document
from snapkv.errors import UnsupportedModelError
from snapkv.hf.identity import identity_of
from snapkv.kvzip import read_context
from snapkv.policies import H2O
from snapkv.storage.ragged import RaggedStore
from tests.families import random_ids, tiny_config, tiny_model

TOKENS, BUDGET = 70, 32
POLICY = KVzip(BUDGET, window_size=4)
WHOLE = ("llama", "phi3", "glm4", "mixtral", "deepseek_v3")
"""Families of full attention in every layer."""
TINY = {"class": "Tiny", "dtype": "float32"}


def write_document(path, *, model, **parts):
    document_files.write_document(path, model, StoredDocument(**parts))


def parts_of(cache):
    """What an engine would hand over of a cache of one row."""
    return {
        "kept": [layer.stored_positions()[0] for layer in cache.layers],
        "keys": [layer.store.padded()[0][0] for layer in cache.layers],
        "values": [layer.store.padded()[1][0] for layer in cache.layers],
        "policy": cache.policy,
    }


def read_once(model, ids, policy, **options):
    cache = CompressedCache(model, policy, **options)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def answered(model, cache, ids):
    longer = torch.cat([ids, random_ids(1, 7, seed=4)], dim=1)
    return model.generate(longer, past_key_values=cache, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize(
    ("family", "policy"),
    [*((family, POLICY) for family in WHOLE), ("llama", AdaKV(POLICY))],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_an_engines_document_is_the_librarys(family, policy, tmp_path):
    model, ids = tiny_model(family), random_ids(1, TOKENS)
    cache = read_context(model, ids, policy)
    cache.save(tmp_path / "library", beside={"input_ids": ids})
    identity = identity_of(model)
    write_document(tmp_path / "engine", model=identity, token_ids=ids[0], **parts_of(cache))
    ours, theirs = (read_sealed(tmp_path / name) for name in ("engine", "library"))
    assert ours.notes == theirs.notes
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert ours.tensors[name].dtype == tensor.dtype
        assert torch.equal(ours.tensors[name], tensor)
    assert_read(tmp_path / "library", cache, ids)
    loaded, beside = CompressedCache.load_with(tmp_path / "engine", model)
    assert torch.equal(beside["input_ids"], ids)
    assert torch.equal(answered(model, loaded, ids), answered(model, cache, ids))


def assert_read(path, cache, ids):
    """An engine reads of a file what the library loads of it."""
    document = read_document(path, model=identity_of(cache.model))
    assert torch.equal(document.token_ids, ids[0])
    assert {document.token_ids.dtype, *(kept.dtype for kept in document.kept)} == {torch.int64}
    assert document.policy == cache.policy
    assert document.seal == seal_of(path)
    loaded = CompressedCache.load(path, cache.model)
    for index, layer in enumerate(loaded.layers):
        held = document.kept[index] >= 0
        assert torch.equal(document.kept[index], cache.kept_positions(index)[0])
        keys, values = layer.store.padded()
        assert torch.equal(document.keys[index][held], keys[0][held])
        assert torch.equal(document.values[index][held], values[0][held])


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (SnapKV(BUDGET, window_size=4), {"storage": "static", "room_tokens": 16}),
        (SnapKV(BUDGET, window_size=4), {"protect": [(0, 9)]}),
        (KeyDiff(BUDGET, window_size=4), {}),
        (ExpectedAttention(BUDGET, window_size=4), {}),
        (FullCache(), {}),
        (AdaKV(SnapKV(BUDGET, window_size=4)), {}),
        (PyramidKV(BUDGET, window_size=4), {}),
    ],
    ids=["static", "protected", "keydiff", "expected", "full", "adakv", "pyramidkv"],
)
def test_any_plain_set_is_a_document(policy, options, tmp_path):
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    cache = read_once(model, ids, policy, **options)
    cache.save(tmp_path / "one", beside={"input_ids": ids[0]})
    assert_read(tmp_path / "one", cache, ids)


def test_ragged_heads_of_one_length_are_a_document(tmp_path):
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    cache = read_once(model, ids, FullCache())
    keys = [layer.keys[0] for layer in cache.layers]
    every = torch.arange(TOKENS).expand(1, 2, -1)
    for layer in cache.layers:
        layer.store = RaggedStore.gather(layer.store, every, TOKENS)
        layer.slots = layer.slots.chosen(every, TOKENS)
    cache.save(tmp_path / "one", beside={"input_ids": ids})
    document = read_document(tmp_path / "one", model=identity_of(model))
    assert all(map(torch.equal, document.keys, keys))
    assert all(torch.equal(kept, every[0]) for kept in document.kept)


@pytest.mark.parametrize("bits", ["int8", "int4", "K8V4"])
def test_a_file_in_few_bits_gives_what_the_library_loads_of_it(bits, tmp_path):
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    cache = read_context(model, ids, POLICY)
    cache.save(tmp_path / "one", beside={"input_ids": ids}, bits=bits)
    assert_read(tmp_path / "one", cache, ids)
    document = read_document(tmp_path / "one", model=identity_of(model))
    assert not torch.equal(document.keys[0], cache.layers[0].keys[0])


def test_a_file_worked_by_hand(tmp_path):
    """One layer with one head, which keeps the first and the last of three tokens."""
    keys, values = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[5.0], [6.0]]])
    write_document(
        tmp_path / "one",
        model=TINY,
        token_ids=torch.tensor([11, 12, 13]),
        kept=torch.tensor([[[0, 2]]]),
        keys=[keys],
        values=[values],
        policy=KVzip(2, window_size=1, sink_tokens=1),
    )
    tensors, notes, _ = read_sealed(tmp_path / "one")
    assert {name: (str(each.dtype), each.tolist()) for name, each in tensors.items()} == {
        "beside.input_ids": ("torch.int64", [[11, 12, 13]]),
        "layers.0.slots.kept": ("torch.int32", [[[0, 2]]]),
        "layers.0.store.keys": ("torch.float32", [[[[1.0, 2.0], [3.0, 4.0]]]]),
        "layers.0.store.values": ("torch.float32", [[[[5.0], [6.0]]]]),
    }
    assert (notes["model"], notes["recalls"]) == (TINY, False)
    assert (notes["seen_tokens"], notes["turn_start"], notes["prompt_end"]) == (3, 0, 3)
    assert notes["policy"] == json.loads(
        json.dumps(KVzip(2, window_size=1, sink_tokens=1).describe())
    )
    (layer,) = notes["layers"]
    assert (layer["kind"], layer["store_kind"]) == ("compressed", "dense")
    assert layer["slots"]["start"] == layer["slots"]["chosen_at"] == 3
    document = read_document(tmp_path / "one", model=TINY)
    assert document.token_ids.tolist() == [11, 12, 13]
    assert [kept.tolist() for kept in document.kept] == [[[0, 2]]]
    assert torch.equal(document.keys[0], keys)
    assert torch.equal(document.values[0], values)


@st.composite
def documents(draw):
    layers, heads, tokens = (draw(st.integers(1, most)) for most in (3, 4, 40))
    count, key_dim, value_dim = (
        draw(st.integers(1, tokens)),
        *(draw(st.integers(1, 9)) for _ in "kv"),
    )
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.rand(layers, heads, tokens, generator=generator)
    whole = torch.randn(layers, heads, tokens, key_dim + value_dim, generator=generator)
    kept = scores.topk(count).indices.sort().values
    states = whole.gather(2, kept[..., None].expand(-1, -1, -1, key_dim + value_dim))
    fewer = torch.randint(0, count, (layers, heads, 1), generator=generator) * draw(st.booleans())
    fewer[:, 0] = 0
    kept = kept.masked_fill(torch.arange(count) < fewer, -1)
    states = states.to(getattr(torch, dtype))
    return {
        "model": TINY | {"dtype": dtype},
        "token_ids": torch.randint(0, 999, (tokens,), generator=generator, dtype=torch.int32),
        "kept": kept,
        "keys": states[..., :key_dim],
        "values": states[..., key_dim:],
    }


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=documents())
def test_what_is_written_is_read_bit_for_bit(given, tmp_path):
    write_document(tmp_path / "one", **given, policy=POLICY)
    document = read_document(tmp_path / "one", model=given["model"])
    assert torch.equal(document.token_ids, given["token_ids"].long())
    held = given["kept"] >= 0
    assert torch.equal(document.head_tokens, held.sum(dim=-1))
    for name in ("kept", "keys", "values"):
        assert torch.equal(torch.stack(list(getattr(document, name)))[held], given[name][held])


TWO = torch.tensor([[[0, 2]]])
STATES = [torch.ones(1, 2, 4)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": torch.tensor([[1, 2, 3]])}, r"got token ids of shape \(1, 3\) in int64"),
        ({"token_ids": torch.tensor([1, -2, 3])}, "got token ids of"),
        ({"token_ids": torch.tensor([1, 2])}, "kept positions that are not ascending below 2"),
        ({"kept": torch.tensor([[0, 2]])}, r"got kept positions of shape \(2,\)"),
        ({"kept": TWO - 2}, "got kept positions of"),
        ({"kept": TWO * 0}, "kept positions that are not ascending below 3"),
        ({"keys": STATES * 2}, "got 2 keys and 1 values for 1 layers"),
        ({"values": [torch.ones(1, 3, 4)]}, r"got keys or values of shape \(1, 3, 4\) in float32"),
        ({"values": [torch.ones(1, 2, 0)]}, r"got keys or values of shape \(1, 2, 0\)"),
        ({"keys": [torch.ones(1, 2, 4).half()]}, "in float16 for a model in float32"),
        ({"keys": [STATES[0] * float("nan")]}, "keys or values that are infinite or no numbers"),
        ({"policy": H2O(2)}, "got them from h2o, which evicts while it generates"),
    ],
)
def test_what_is_no_document_is_not_written(change, said, tmp_path):
    given = {"token_ids": torch.tensor([1, 2, 3]), "kept": TWO, "keys": STATES, "values": STATES}
    given |= {"policy": POLICY}
    write_document(tmp_path / "good", model=TINY, **given)
    with pytest.raises(InvalidArgumentError, match=f"document: expected token ids.*{said}"):
        write_document(tmp_path / "bad", model=TINY, **given | change)
    assert not (tmp_path / "bad").exists()


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
