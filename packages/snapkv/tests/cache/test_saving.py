"""Saved caches: another process continues them, and damaged or incomplete files are refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from snapkv import (
    AdaKV,
    CacheFileError,
    CacheMismatchError,
    CompressedCache,
    FastGen,
    InvalidTypeError,
    SnapKV,
)
from snapkv.cache.saving.files import _seal, read_sealed, write_sealed
from tests.cache.saver import filled
from tests.families import generated, random_ids, tiny_config, tiny_model
from tests.methods import CACHES

PROMPT = 90
POLICY = SnapKV(40, window_size=8)
ROOT = Path(__file__).parents[4]
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

TOKENS = FastGen(0.8, special_ids=(3, (4, 5)), punctuation_ids=(6, 7))
FADING = SnapKV(40, window_size=8, pooling="fading", decay=0.8)


def halfway(model, name):
    """Return a cache that has read a prompt and generated a few tokens, and all token ids."""
    policy, options = CACHES[name]
    cache = CompressedCache(model, policy, **options)
    return cache, generated(model, cache, random_ids(2, PROMPT))


# Refusals.


def damaged_files(good, other):
    """Yield the name and content of damaged files: flipped bits, missing ends, exchanged parts."""
    draw = random.Random(5)
    size, header = len(good), 8 + int.from_bytes(good[:8], "little")
    other_header = 8 + int.from_bytes(other[:8], "little")
    for place in (*range(8), header - 1, header, size - 1):
        yield f"bit at {place}", _flipped(good, place, draw)
    for length in (0, 1, 7, 8, 9, header - 1, header, size // 2, size - 1):
        yield f"cut at {length}", good[:length]
    yield "swapped", good[: size // 2] + good[size // 2 :][::-1]
    yield "header of another cache", other[:other_header] + good[header:]
    yield "data of another cache", good[:header] + other[other_header:]
    yield "a byte more", good + b"\0"
    for junk in (b"{}", b"\x80\x04\x95pickle", b"\xff" * 64, b"\0" * 64):
        yield f"{len(junk)} bytes of junk", junk


def _flipped(good, place, draw):
    spoilt = bytearray(good)
    spoilt[place] ^= 1 << draw.randrange(8)
    return bytes(spoilt)


def test_damaged_files_are_refused(tmp_path):
    """In a small file, a change of every sixteenth byte is tried."""
    model = tiny_model("llama")
    files = []
    for tokens in (90, 80):
        filled(model, tokens).save(tmp_path / "good")
        files.append((tmp_path / "good").read_bytes())
    spoilt = list(damaged_files(*files))
    CompressedCache(model, POLICY).save(tmp_path / "good")
    good, draw = (tmp_path / "good").read_bytes(), random.Random(1)
    spoilt += [(f"small, {at}", _flipped(good, at, draw)) for at in range(3, len(good), 16)]
    accepted = []
    for name, content in spoilt:
        (tmp_path / "spoilt").write_bytes(content)
        accepted += [] if _is_refused(tmp_path / "spoilt") else [name]
    assert not accepted


def _is_refused(path):
    try:
        read_sealed(path)
    except CacheFileError as error:
        return str(error).startswith("path: expected a file that was written by cache.save")
    return False


def test_other_files_and_missing_files_are_refused(tmp_path):
    model = tiny_model("llama")
    with pytest.raises(CacheFileError, match="there is no file with the name"):
        CompressedCache.load(tmp_path / "nothing", model)
    with pytest.raises(CacheFileError, match="path: expected a file that"):
        CompressedCache.load(tmp_path, model)
    save_file({"weights": torch.ones(3)}, tmp_path / "weights")
    with pytest.raises(CacheFileError, match="its header is not one of a saved cache"):
        CompressedCache.load(tmp_path / "weights", model)
    with pytest.raises(CacheFileError, match="path: the cache could not be written"):
        filled(model, 60).save(tmp_path / "no" / "folder")


HEADERS = {"deep": "[" * 100_000, "no JSON": "none", "a list": "[1]", "no metadata": None}


@pytest.mark.parametrize("notes", HEADERS.values(), ids=HEADERS)
def test_malformed_headers_with_a_valid_checksum_are_refused(notes, tmp_path):
    unsealed = {"sha256": "0" * 64}
    whole = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    if notes is None:
        whole["x"] |= unsealed
    else:
        whole["__metadata__"] = {"format": "snapkv cache 3", "notes": notes, **unsealed}
    header, path = json.dumps(whole, separators=(",", ":")).encode(), tmp_path / "one"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    _seal(path)
    with pytest.raises(CacheFileError, match="path: expected a file that was written by cache"):
        CompressedCache.load(path, tiny_model("llama"))


def test_file_of_another_format_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("snapkv.cache.saving.files._VERSION", 2)
    filled(tiny_model("llama"), 60).save(tmp_path / "old")
    monkeypatch.undo()
    with pytest.raises(
        CacheFileError, match="got 'snapkv cache 2', which is a different"
    ) as raised:
        CompressedCache.load(tmp_path / "old", tiny_model("llama"))
    assert "\n" not in str(raised.value)


FORGED = {
    "no layers": lambda notes: notes.pop("layers"),
    "a layer less": lambda notes: notes["layers"].pop(),
    "a tensor that is not there": lambda notes: keys_are(notes, {"tensor": "elsewhere"}),
    "a record that is none": lambda notes: keys_are(notes, {"record": "Path", "parts": {}}),
    "a layer without notes": lambda notes: notes["layers"][1].update(notes={}),
    "keys of fewer tokens": lambda notes: keys_are(notes, notes["layers"][1]["slots"]["kept"]),
    "columns before the first": lambda notes: notes["layers"][0]["slots"].update(start=-5),
    "a kind of store that is none": lambda notes: notes["layers"][0].update(store_kind="sparse"),
    "a parameter that the policy has not": lambda notes: notes["policy"].update(speed=1),
    "a question that is text": lambda notes: notes.update(question_tokens="some"),
    "options that are text": lambda notes: notes.update(options="text"),
}


def keys_are(notes, saved):
    notes["layers"][0]["store"]["keys"] = saved


@pytest.mark.parametrize("change", FORGED)
def test_contradictory_contents_with_a_valid_checksum_are_refused(tmp_path, change):
    """Somebody who can compute the checksum may have changed the notes."""
    model = tiny_model("llama")
    filled(model, 60).save(tmp_path / "cache")
    tensors, notes = read_sealed(tmp_path / "cache")
    FORGED[change](notes)
    write_sealed(tmp_path / "forged", tensors, notes)
    with pytest.raises(CacheFileError, match="forged' do not fit together"):
        CompressedCache.load(tmp_path / "forged", model)


def test_load_with_another_policy_is_refused(tmp_path):
    model = tiny_model("llama")
    for policy, other in (
        (TOKENS, replace(TOKENS, special_ids=(3, (4, 6)))),
        (TOKENS, POLICY),
        (AdaKV(FADING), AdaKV(replace(FADING, decay=0.7))),
    ):
        cache = CompressedCache(model, policy)
        generated(model, cache, random_ids(1, PROMPT))
        cache.save(tmp_path / "one")
        assert CompressedCache.load(tmp_path / "one", model, policy=policy).policy == policy
        with pytest.raises(CacheMismatchError, match="policy: expected the same policy as in the"):
            CompressedCache.load(tmp_path / "one", model, policy=other)


def test_load_into_another_model_or_dtype_is_refused(tmp_path):
    model = tiny_model("llama")
    filled(model, 60).save(tmp_path / "one")

    def refuses(other, said):
        with pytest.raises(CacheMismatchError, match=said):
            CompressedCache.load(tmp_path / "one", other)

    refuses(tiny_model("qwen2"), "class LlamaForCausalLM.*got class Qwen2")
    torch.manual_seed(1)
    refuses(AutoModelForCausalLM.from_config(tiny_config("llama")).eval(), "other weights")
    changed = tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    same_weights = AutoModelForCausalLM.from_config(changed)
    same_weights.load_state_dict(model.state_dict())
    refuses(same_weights, "other settings")
    half = AutoModelForCausalLM.from_config(tiny_config("llama"))
    half.load_state_dict(model.state_dict())
    CompressedCache.load(tmp_path / "one", half)
    refuses(half.to(torch.bfloat16), "dtype float32.*got dtype bfloat16")
    refuses(half.to(torch.float32), "other weights")  # they have been rounded
    with pytest.raises(InvalidTypeError, match="model: expected a PreTrainedModel of transformers"):
        CompressedCache.load(tmp_path / "one", "llama")


def test_load_with_recall_is_refused_if_the_cache_was_saved_without_recall(tmp_path):
    model = tiny_model("llama")
    halfway(model, "snapkv")[0].save(tmp_path / "one")
    with pytest.raises(CacheMismatchError, match="recall: the cache was saved without recall"):
        CompressedCache.load(tmp_path / "one", model, recall="host")
    halfway(model, "recall")[0].save(tmp_path / "two")
    loaded = CompressedCache.load(tmp_path / "two", model, recall=tmp_path / "parked")
    assert loaded.report().host_bytes


def test_saved_file_can_be_read_by_safetensors(tmp_path):
    filled(tiny_model("llama"), 60).save(tmp_path / "one")
    with safe_open(tmp_path / "one", framework="pt") as content:
        notes = json.loads(content.metadata()["notes"])
        assert notes["policy"]["name"] == "snapkv"
        assert notes["seen_tokens"] == 60
        assert content.get_tensor("layers.0.store.keys").shape == (8, 2, 40, 8)


def test_save_refuses_values_beside_the_cache_that_are_not_tensors(tmp_path):
    cache, path = CompressedCache(tiny_model("llama"), SnapKV(40)), tmp_path / "cache"
    with pytest.raises(
        InvalidTypeError, match="beside: expected tensors, but got a value of type l"
    ):
        cache.save(path, beside={"ids": [1, 2]})
    assert not list(tmp_path.iterdir())


def test_failed_save_leaves_only_the_old_file(tmp_path, monkeypatch):
    model = tiny_model("llama")
    filled(model, 60).save(tmp_path / "one")
    before = (tmp_path / "one").read_bytes()
    monkeypatch.setattr("snapkv.cache.saving.files._seal", _full_disk)
    with pytest.raises(CacheFileError, match="No space left"):
        filled(model, 70).save(tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == before
    assert os.listdir(tmp_path) == ["one"]


def _full_disk(path):
    raise OSError(28, "No space left on device")


@pytest.mark.slow  # of the steps that a kill can come between, `test_writing.py` tries each
def test_killed_save_never_leaves_an_incomplete_file(tmp_path):
    """Processes are killed until 25 of them were writing a file."""
    path, draw, unfinished = tmp_path / "one", random.Random(3), 25
    found, kills = set(), 0
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cache.saver", str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=HERE,
    ) as saver:
        save_seconds = float(saver.stdout.readline())
        while len(partial := set(tmp_path.glob(".one.*.partial"))) < unfinished:
            assert kills < 200 * unfinished, "hardly a kill came while a file was being written"
            print("save", file=saver.stdin, flush=True)
            child = int(saver.stdout.readline())
            while set(tmp_path.glob(".one.*.partial")) <= partial:
                time.sleep(0.001)
            time.sleep(draw.random() * save_seconds)
            os.kill(child, signal.SIGKILL)
            assert saver.stdout.readline() == "gone\n"
            found.add(read_sealed(path).notes["seen_tokens"])
            kills += 1
        saver.stdin.close()
    assert found <= {300, 400}


def test_save_never_replaces_a_file_that_is_not_a_saved_cache(tmp_path):
    cache, _ = halfway(tiny_model("llama"), "snapkv")
    other = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, other)
    short, notes = tmp_path / "short", tmp_path / "notes.txt"
    short.write_bytes(b"hi")
    notes.write_text('about "format":"snapkv cache 1"')
    for path in (other, short, notes, tmp_path, Path("/dev/null")):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(CacheFileError, match="is not a saved cache"):
            cache.save(path)
        assert before is None or path.read_bytes() == before
    assert Path("/dev/null").is_char_device()
    (tmp_path / "empty").touch()
    for _ in range(2):  # an empty file is replaced, and a saved cache
        cache.save(tmp_path / "empty")
