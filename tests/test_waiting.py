"""How often a GPU would be waited for: every time Python asks for a number that is on it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snapkv import H2O, CompressedCache, SnapKV, attention
from tests.families import random_ids, tiny_model

LAYERS = 4
ASKING = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
SNAPKV = SnapKV(budget=16, window_size=4, kernel_size=3)


class Asked(TorchDispatchMode):
    """Counts the operations that bring a number, or a shape that depends on one, to Python."""

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
    """Runs something as on a GPU and tells how often it asked."""
    monkeypatch.setattr(attention, "_is_behind", lambda states: True)
    to_list, lists = torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: lists.append(1) or to_list(t))

    def count(run):
        lists.clear()
        with torch.no_grad(), Asked() as mode:
            run()
        return mode.times + len(lists)

    return count


@pytest.mark.parametrize(
    ("policy", "storage", "prompt", "token"),
    [
        (SNAPKV, "dynamic", 0, 0),
        (H2O(budget=24), "dynamic", 0, 0),
        (SNAPKV, "static", 3, 2),  # how many slots are filled, once per pass
    ],
    ids=["snapkv", "h2o", "static"],
)
def test_no_layer_is_waited_for_but_where_its_attention_is_judged(
    policy, storage, prompt, token, asked
):
    """The judged ones are asked for together: at the first layer, and at the last."""
    model = tiny_model("llama")
    cache = CompressedCache(model, policy, storage=storage)
    ids = random_ids(2, 64)
    assert asked(lambda: model(ids, past_key_values=cache)) == LAYERS + prompt
    for _ in range(2):
        assert asked(lambda: model(ids[:, :1], past_key_values=cache)) == token


def test_tokens_behind_a_padded_batch_are_not_waited_for_in_every_layer(asked):
    model = tiny_model("llama")
    ids, mask = random_ids(2, 64), torch.ones(2, 64, dtype=torch.int64)
    mask[1, :9] = 0
    cache = CompressedCache(model, SNAPKV)
    model(ids, past_key_values=cache, attention_mask=mask)
    times = []
    for _ in range(3):
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
        step = {"past_key_values": cache, "attention_mask": mask}
        times.append(asked(lambda step=step: model(ids[:, :1], **step)))
    assert times == [1 + LAYERS, 1, 1]  # transformers asks once, whether to make a mask
