"""The step that vLLM profiles needs at least as much memory as the step of any request."""

import contextlib
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from snapkv import ops
from snapkv_vllm.across_layers import find_across_layers, select_across
from snapkv_vllm.admission.methods import parameter_names
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.memory_profile import LargestStep, hold_largest_queries
from tests.ops.states import random_layer

HEADS, KV_HEADS, WIDTH, LAYERS = 6, 2, 16, 3
LAYER = SimpleNamespace(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=WIDTH, impl=SimpleNamespace(scale=0.25)
)
PROMPT, STEP, REQUESTS = 3000, 500, 4


class Peak(TorchDispatchMode):
    """Bytes of the tensors that are alive, now and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._users = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key, size = storage.data_ptr(), storage.nbytes()
                self._use(key, size, 1)
                weakref.finalize(tensor, self._use, key, size, -1)
        return out

    def _use(self, key, size, users):
        before = self._users[key]
        self._users[key] += users
        self.now += size * (bool(self._users[key]) - bool(before))
        self.most = max(self.most, self.now)


def config(settings, **sizes):
    sizes = {"max_num_batched_tokens": STEP, "max_num_seqs": REQUESTS} | sizes
    return SimpleNamespace(
        additional_config=settings.to_config(),
        scheduler_config=SimpleNamespace(**sizes),
        model_config=SimpleNamespace(max_model_len=PROMPT),
    )


def test_largest_step_matches_an_example_worked_out_by_hand():
    largest = LargestStep.from_config(config(ServingSettings(budget=64, max_window_size=40)))
    asked = {(one.window_size, one.voters, one.budget) for one in largest.policies}
    assert asked == {(40, 40, 2999), (1, 40, 2999)}
    assert {one.pooling for one in largest.policies} == {"max", "avg", "fading"}
    assert (largest.prompt_tokens, largest.step_tokens) == (3000, 500)
    assert largest.recorded_tokens == 4 * 40 + 40  # four requests, and what one began before
    many = LargestStep.from_config(config(ServingSettings(max_window_size=40), max_num_seqs=256))
    assert many.recorded_tokens == 500 + 40
    sinks = LargestStep.from_config(config(ServingSettings(policy="streaming-llm")))
    assert ([one.query_tokens for one in sinks.policies], sinks.recorded_tokens) == ([0], 0)
    assert LargestStep.from_config(config(ServingSettings(policy="tova"))).recorded_tokens == 4 + 1


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"policy": "snapkv"},
        {"policy": "snapkv", "parameters": {"voters": 40}},
        {"policy": "adakv"},
        {"policy": "across-layers"},
        {"policy": "tova"},
        {"policy": "streaming-llm"},
    ],
)
def test_no_step_needs_more_memory_than_was_profiled(given):
    settings = ServingSettings(**given, budget=200, max_window_size=48)
    largest = LargestStep.from_config(config(settings))
    with Peak() as peak, held_during(largest):
        waiting = peak.now
    queries = HEADS * WIDTH * 4
    assert waiting >= LAYERS * largest.recorded_tokens * queries
    requests = [{"snapkv_budget": budget} for budget in (100, 1500, PROMPT - 1)]
    if "voters" in parameter_names(settings.policy):
        wide = {"snapkv_pooling": "avg", "snapkv_kernel_size": 129}
        windows = {"snapkv_window_size": 48}, {"snapkv_window_size": 1, "snapkv_voters": 48}
        requests += [one | window for one in requests for window in windows]
        poolings = wide, {"snapkv_pooling": "max"}, {"snapkv_pooling": "fading"}
        requests += [one | pooling for one in requests for pooling in poolings]
    for request in requests:
        made = settings.policy_for_request(request)
        assert waiting + bytes_of_a_step(made) <= peak.most, request


@contextlib.contextmanager
def held_during(largest):
    device = torch.device("cpu")
    with hold_largest_queries([LAYER] * LAYERS, largest, dtype=torch.float32, device=device):
        yield


@torch.inference_mode()
def bytes_of_a_step(policy):
    """At most, while one layer of the longest prompt is compressed."""
    shape = {"query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH}
    layer = random_layer(0, prompt_tokens=PROMPT, query_tokens=policy.query_tokens, **shape)
    if find_across_layers(policy):
        return bytes_of_all_layers(policy, layer)
    with Peak() as peak:
        keys = layer.keys.clone()
        keep = policy.select(replace(layer, keys=keys)).keep_indices
        kept = [ops.gather_tokens(keys, keep) for _ in range(2)]
    assert len(kept) == 2
    return peak.most


def bytes_of_all_layers(policy, layer):
    """As `Compressor` has them: scores of all, then what stays of all, with one layer whole."""
    budget = policy.policy.budget
    laid_tokens = LAYERS * KV_HEADS * (budget + 31) // 32 * 32
    with Peak() as peak:
        seen = (replace(layer, keys=layer.keys.clone(), num_layers=LAYERS) for _ in range(LAYERS))
        masks = select_across(policy, seen, budget)
        laid = [torch.empty(laid_tokens, WIDTH) for _ in range(2)]
        for mask in masks:
            keys, keep = layer.keys.clone(), ops.kept_indices(mask).clamp(min=0)
            kept = [ops.gather_tokens(keys, keep) for _ in range(2)]
    assert len(kept) == len(laid)
    return peak.most


@pytest.mark.parametrize("given", [{}, {"policy": "across-layers"}])
def test_prompt_shorter_than_the_largest_window_is_profiled(given):
    settings = ServingSettings(budget=64, max_window_size=100, **given)
    small = config(settings)
    small.model_config.max_model_len = 60
    with held_during(LargestStep.from_config(small)):
        pass
