"""Triton kernels for votes are as accurate as the reference and are chosen where they can run."""

import importlib.util
from functools import partial

import pytest
import torch

from snapkv import CompressedCache, InvalidArgumentError, SnapKV, default_policy, ops
from snapkv.ops import AttentionStates, ScoreOptions, choice
from snapkv.ops.votes import api
from tests.families import random_ids, tiny_model
from tests.ops.vote_cases import (
    FADED_CASES,
    SHAPES,
    require_fading,
    require_largest,
    require_unlike_numbers,
    require_votes,
    states,
)

GIVEN = AttentionStates(*states(SHAPES["gqa-63"]), ScoreOptions(scaling=0.2))
OPERATIONS = {
    "window_votes": partial(ops.window_votes, GIVEN),
    "largest_votes": partial(ops.largest_votes, GIVEN, ops.Fading(0.9), prefix_tokens=55),
    "fade_votes": partial(ops.fade_votes, torch.rand(1, 2, 9), 0.9),
}


@pytest.mark.parametrize("run", OPERATIONS.values(), ids=OPERATIONS)
def test_triton_is_refused_on_a_cpu_and_without_its_package(run, monkeypatch):
    reason = "on the device cpu" if importlib.util.find_spec("triton") else "the package"
    with pytest.raises(InvalidArgumentError, match=rf"'triton' .*{reason}.*impl='auto'"):
        run(impl="triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgumentError, match="because the package triton is not installed"):
        run(impl="triton")


def test_reason_names_the_unsupported_input_of_a_kernel(monkeypatch):
    monkeypatch.setattr(choice, "INTERPRETED", True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    wide = torch.zeros(1, 1, 4, 264)
    assert "head_dim of 264" in api._obstacle("window_votes", wide)
    assert "pooled" in api._obstacle("largest_votes", wide, ops.Pooling(5, "max"))
    assert "more than 128 channels" in api._obstacle("largest_votes", wide, ops.Fading(0.9))
    assert api._obstacle("fade_votes", wide) is None
    assert "torch.float64" in api._obstacle("fade_votes", wide.double())
    wide.requires_grad_()
    assert "gradients" in api._obstacle("fade_votes", wide)


def test_reason_names_the_compute_capability_of_old_gpus(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    states = torch.zeros(1, 1, 4, 64)
    for capability, obstacle in (((7, 5), "a compute capability below 8.0"), ((8, 0), None)):
        monkeypatch.setattr(choice, "_capability", lambda _, found=capability: found)
        named = choice.triton_obstacle(states)
        assert named is None if obstacle is None else obstacle in named


on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("impl", [pytest.param("triton", marks=on_cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_on_a_gpu_are_as_accurate_as_the_reference(impl, dtype):
    few = {"kinds": ("", "all"), "reduces": ("none", "mean")}  # a second of compiling for each
    require_votes(impl, dtype, "cuda", shapes=("gqa-63", "several splits", "window 1"), **few)
    require_fading(impl, "cuda", lengths=(0, 1, 1025, 2100), decays=(1e-300, 0.9, 1 - 1e-9))
    require_largest(impl, dtype, "cuda", cases=FADED_CASES[1:3])


@pytest.mark.parametrize("impl", ["reference", "blocked", pytest.param("triton", marks=on_cuda)])
def test_largest_vote_of_nan_scores_stays_nan(impl):
    require_unlike_numbers(impl, "cuda" if impl == "triton" else "cpu")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_prefill_on_a_gpu_runs_the_kernels(device, monkeypatch):
    ran = []
    choose = api._implementation

    def watched(operation, *arguments):
        ran.append((operation, choose(operation, *arguments).__module__))
        return choose(operation, *arguments)

    monkeypatch.setattr(api, "_implementation", watched)
    model = tiny_model("llama").to(device)
    try:
        for policy in (SnapKV(40, window_size=8, pooling="fading"), default_policy(40)):
            with torch.no_grad():
                cache = CompressedCache(model, policy)
                model(random_ids(1, 100).to(device), past_key_values=cache)
    finally:
        model.to("cpu")
    assert set(ran) == set(api._KERNELS.items())
