"""How often Python would wait for a GPU because it reads a number that is stored there."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snapkv import H2O, RKV, AdaKV, CompressedCache, SnapKV, default_policy
from tests.families import random_ids, tiny_model

ASKING = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
SNAPKV = SnapKV(budget=16, window_size=4, kernel_size=3)


class Asked(TorchDispatchMode):
    """Counts operations that make Python wait for a number, or for a shape that depends on one."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in arguments[1]
        )
        self.times += name in ASKING or by_mask
        return function(*arguments, **options or {})


@pytest.fixture
def asked(monkeypatch):
    """Return a function that counts the waits of a forward pass in each layer."""
    to_list, lists = torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: lists.append(1) or to_list(t))

    def count(model, ids, **options):
        lists.clear()
        marks = [0]
        with torch.no_grad(), Asked() as mode:
            hooks = [
                layer.register_forward_hook(lambda *_: marks.append(mode.times + len(lists)))
                for layer in model.model.layers
            ]
            model(ids, **options)
        for hook in hooks:
            hook.remove()
        return [later - before for before, later in itertools.pairwise(marks)]

    return count


@pytest.mark.parametrize(
    ("policy", "options", "prompt", "token"),
    [
        (SNAPKV, {}, [0, 0, 0, 2], [0, 0, 0, 0]),
        (H2O(budget=24), {}, [1, 0, 0, 1], [0, 0, 0, 0]),
        (RKV(24, window_size=4, evict_every=1), {}, [1, 0, 0, 1], [0, 0, 0, 0]),
        # Two more a layer ask for counts, which are on the host.
        (AdaKV(SNAPKV), {}, [0, 0, 0, 3 + 2 * 4], [0, 0, 0, 0]),
        (default_policy(16, window_size=4), {}, [0, 0, 0, 3], [0, 0, 0, 0]),
        (default_policy(16, window_size=4), {"quantize": "int4"}, [0, 0, 0, 4], [0, 0, 0, 0]),
    ],
    ids=["snapkv", "h2o", "r-kv", "adakv", "default", "default int4"],
)
def test_middle_layers_do_not_wait_for_device(policy, options, prompt, token, asked):
    """The fidelity check waits once for the first layers and, after the last, once for all others.

    A policy that scores the prefix waits once more to check that all scores are finite. Here all
    layers select together if they can.
    """
    model = tiny_model("llama")
    cache = CompressedCache(model, policy, **options)
    ids = random_ids(2, 64)
    assert asked(model, ids, past_key_values=cache) == prompt
    for _ in range(2):
        assert asked(model, ids[:, :1], past_key_values=cache) == token


def test_decode_step_of_padded_batch_waits_for_device_once(asked):
    model = tiny_model("llama")
    ids, mask = random_ids(2, 64), torch.ones(2, 64, dtype=torch.int64)
    mask[1, :9] = 0
    cache = CompressedCache(model, SNAPKV)
    model(ids, past_key_values=cache, attention_mask=mask)
    times = []
    for _ in range(3):
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
        times.append(asked(model, ids[:, :1], past_key_values=cache, attention_mask=mask))
    # transformers asks once, whether to make a mask
    assert times == [[2, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]]
