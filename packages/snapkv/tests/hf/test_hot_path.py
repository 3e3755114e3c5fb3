"""How much work a compressed cache adds to the model's own: numbers that may only fall.

On a GPU each of them is a launch, or Python between two launches.
"""

import collections
import sys

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from snapkv import AdaKV, CompressedCache, SnapKV, default_policy
from tests.families import call, random_ids, tiny_model

LAYERS, PROMPT = 4, 400
POLICY = SnapKV(128)
WAYS = {
    "snapkv": (POLICY, {}),
    "adakv": (AdaKV(POLICY), {}),
    "int4": (POLICY, {"quantize": "int4"}),
    "default": (default_policy(128), {}),
}
VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "view",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts tensor operations, views left out."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.__name__.split(".")[0] not in VIEWS
        return function(*args, **(kwargs or {}))


def counted(read):
    with Operations() as operations:
        read()
    return operations.count


def calls(read):
    """Calls of Python functions of the library."""
    found = collections.Counter()

    def follow(frame, event, _):
        found[event == "call" and "/snapkv/src/snapkv/" in frame.f_code.co_filename] += 1

    sys.setprofile(follow)
    try:
        read()
    finally:
        sys.setprofile(None)
    return found[True]


def per_layer(count, cache):
    """What reading a prompt takes in a layer, and a step behind it, the second one."""
    ids, step = random_ids(1, PROMPT), random_ids(1, 1, 1)
    model = tiny_model("llama")
    prompt = count(lambda: call(model, cache, ids))
    call(model, cache, step)
    return prompt / LAYERS, count(lambda: call(model, cache, step)) / LAYERS


RELEASES = torch.__version__[:4], transformers.__version__[:4]
# At the prompt's end, in a step: operations above transformers' own, calls.
LIMITS = {
    "snapkv": (66, 0, 145, 30),
    "adakv": (77, 7, 172, 40),
    "int4": (110, 26, 200, 63),
    "default": (177, 7, 233, 44),
}


@pytest.mark.skipif(RELEASES != ("2.13", "5.24"), reason="other releases do other work")
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_the_work_of_a_layer_may_only_fall(way):
    policy, options = WAYS[way]
    model = tiny_model("llama")
    own = per_layer(counted, DynamicCache(config=model.config))
    operations = per_layer(counted, CompressedCache(model, policy, **options))
    called = per_layer(calls, CompressedCache(model, policy, **options))
    found = [here - theirs for here, theirs in zip(operations, own, strict=True)] + list(called)
    assert all(number <= limit for number, limit in zip(found, LIMITS[way], strict=True)), found
