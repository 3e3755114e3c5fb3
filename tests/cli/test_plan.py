"""`snapkv plan` as a user types it."""

import json

import pytest

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
