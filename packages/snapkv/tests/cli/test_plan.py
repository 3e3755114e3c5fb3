"""`snapkv plan` as a user types it."""

import json

import pytest

from snapkv.plan.shapes import SHAPES
from tests.families import tiny_config


def test_the_table_answers_from_a_shape(snapkv):
    done = snapkv("plan", "--model", "lwm-7b", "--context", "128k", "--gpu-memory", "80GB")
    assert done.status == 0
    assert "64.0 GiB" in done.out
    assert "what makes this fit" in done.out


def test_a_folder_with_a_configuration_and_no_weights_is_enough(snapkv, tmp_path):
    tiny_config("gemma2").save_pretrained(tmp_path)
    done = snapkv("plan", "--model", tmp_path, "--context", "256", "--budget", "64", "--json")
    assert done.status == 0, done.err
    plan = json.loads(done.out)
    assert plan["full"]["cache_bytes"] > plan["compressed"]["cache_bytes"]
    assert plan["full"]["largest_batch"] is None
    assert any("slide over a window" in sentence for sentence in plan["verdict"])


def test_thousands_of_every_kind_are_read(snapkv):
    asked = ("--context", "1.5k", "--budget", "0.5k", "--gpu-memory", "24G", "--reserve", "128kb")
    plan = json.loads(snapkv("plan", *asked, "--json").out)["request"]
    assert (plan["context_tokens"], plan["budget"]) == (1536, 512)
    assert (plan["memory_bytes"], plan["reserve_bytes"]) == (24 * 10**9, 128_000)


def test_the_shapes_are_listed(snapkv):
    done = snapkv("plan", "--shapes")
    assert done.status == 0
    assert all(shape in done.out for shape in SHAPES)
    listed = json.loads(snapkv("plan", "--shapes", "--json").out)
    assert list(listed) == list(SHAPES)
    assert listed["gpt-oss-20b"]["weights"] == "mxfp4"
    assert listed["llama-3.1-8b"]["positions"] == 131072


def test_batches_say_for_which_phase_they_are(snapkv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    done = snapkv("plan", "--model", "qwen3-8b", "--context", "32k", "--gpu-memory", "80GB")
    assert "largest batch, reading together" in done.out
    assert "largest batch, decoding" in done.out


def test_times_appear_with_a_bandwidth(snapkv):
    arguments = ("plan", "--model", "mistral-7b", "--context", "32k", "--bandwidth", "2TB")
    done = snapkv(*arguments)
    assert "per token, at least" in done.out
    assert " ms" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "1k,2k"], "context: expected one number"),
        (["--context", "many"], "context"),
        (["--context", "128kb"], "write for instance --context 128k"),
        (["--context", "1.3k"], "write for instance --context 1331"),
        (["--context", "1k", "--model", "qwen3-9b"], "did you mean qwen3-8b"),
        (["--context", "1k", "--gpu-memory", "80"], "gpu_memory: expected bytes with a unit"),
        (["--context", "1k", "--model", "./none"], "model: expected an existing file"),
        (["--context", "1k", "--model", "lwm-7b", "--dtype", "int8"], "dtype: expected one of"),
        (["--context", "1k", "--budget", "9", "--keep-ratio", "0.5"], "expected one of them"),
        ([], "context"),
    ],
)
def test_bad_input_is_one_line(snapkv, arguments, said):
    done = snapkv("plan", *arguments)
    assert done.status == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1
