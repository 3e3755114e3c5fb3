"""The operations and Python calls that a compressed cache adds to a layer stay within limits.

On a GPU each operation is a kernel launch, and each call is time between two launches.
"""

import collections
import sys

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from snapkv import AdaKV, CompressedCache, SnapKV, default_policy
from snapkv.ops.votes import api, reference
from tests.families import call, peaked_model, random_ids, tiny_config

LAYERS, PROMPT = 32, 400  # what is done once a prompt weighs as in a large model
POLICY = SnapKV(128)
WAYS = {
    "snapkv": (POLICY, {}),
    "adakv": (AdaKV(POLICY), {}),
    "int4": (POLICY, {"quantize": "int4"}),
    "default": (default_policy(128), {}),
    "default by votes": (default_policy("auto"), {}),
}
VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "view",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts tensor operations except views."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.__name__.split(".")[0] not in VIEWS
        return function(*args, **(kwargs or {}))


def counted(read):
    with Operations() as operations:
        read()
    return operations.count


def calls(read):
    """Count the calls of Python functions of the library."""
    found = collections.Counter()

    def follow(frame, event, _):
        found[event == "call" and "/snapkv/src/snapkv/" in frame.f_code.co_filename] += 1

    sys.setprofile(follow)
    try:
        read()
    finally:
        sys.setprofile(None)
    return found[True]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Count votes for all rows at once and let all layers select together, as on a GPU."""
    largest = {**api._IN_TORCH["largest_votes"], "blocked": reference.largest_votes}
    monkeypatch.setitem(api._IN_TORCH, "largest_votes", largest)


@pytest.fixture(scope="module")
def model():
    config = tiny_config("llama")
    config.num_hidden_layers = LAYERS
    return peaked_model(config, "sdpa")


def per_layer(count, model, cache):
    """Return the counts per layer of reading a prompt and of the second decode step after it."""
    ids, step = random_ids(1, PROMPT), random_ids(1, 1, 1)
    prompt = count(lambda: call(model, cache, ids))
    call(model, cache, step)
    return prompt / LAYERS, count(lambda: call(model, cache, step)) / LAYERS


RELEASES = torch.__version__[:4], transformers.__version__[:4]
# At the prompt's end, in a step: operations above transformers' own, calls.
LIMITS = {
    "snapkv": (10, 0, 56, 18),
    "adakv": (13, 7, 71, 27),
    "int4": (14, 26, 100, 44),
    "default": (12, 7, 75, 29),
    "default by votes": (14, 7, 70, 28),
}


@pytest.mark.skipif(RELEASES != ("2.13", "5.24"), reason="other releases do other work")
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_operations_and_calls_per_layer_stay_within_limits(model, way):
    policy, options = WAYS[way]
    own = per_layer(counted, model, DynamicCache(config=model.config))
    operations = per_layer(counted, model, CompressedCache(model, policy, **options))
    called = per_layer(calls, model, CompressedCache(model, policy, **options))
    found = [here - theirs for here, theirs in zip(operations, own, strict=True)] + list(called)
    assert all(number <= limit for number, limit in zip(found, LIMITS[way], strict=True)), found
