"""Products of few rows: equal numbers, used only where torch is slow, and removed at the end."""

import pytest
import torch
from torch.nn import Linear, Module, ModuleList

from snapkv import CompressedCache, FullCache
from snapkv_lab.medusa import Medusa
from snapkv_lab.medusa.verifying import MOST_ROWS, fast_few_rows
from tests.families import random_ids, tiny_model
from tests.lab.medusa.heads import random_heads
from tests.pairs import pairs


class Doubled(Linear):
    """A linear layer of another package."""

    def forward(self, states):
        return 2 * super().forward(states)


def replaced(model: Module) -> int:
    return sum("forward" in vars(module) for module in model.modules())


@torch.no_grad()
@pairs(shape=((1,), (1, MOST_ROWS), (2, 2), (1, MOST_ROWS + 1)), bias=(False, True))
def test_fast_product_of_few_rows_equals_the_linear_layer(shape, bias):
    torch.manual_seed(0)
    layer, states = Linear(48, 80, bias=bias), torch.randn(*shape, 48)
    expected = layer(states)
    with fast_few_rows(layer):
        found = layer(states)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_other_layers_dtypes_and_training_are_left_alone():
    layers = ModuleList([Doubled(4, 4), Linear(4, 4, dtype=torch.bfloat16), Linear(4, 4)])
    with fast_few_rows(layers):
        assert replaced(layers) == 1
        assert layers[2](torch.randn(2, 4)).requires_grad
    assert replaced(layers) == 0


def test_linear_layers_are_restored_after_a_text_or_an_error():
    model = tiny_model("llama")
    seen = []

    def criterion(ids, scores, **_):
        del ids, scores
        seen.append(replaced(model))
        if len(seen) > 2:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        model.generate(
            random_ids(1, 20),
            past_key_values=CompressedCache(model, FullCache()),
            custom_generate=Medusa(random_heads(model)),
            stopping_criteria=[criterion],
            max_new_tokens=8,
            do_sample=False,
        )
    assert min(seen) > 0
    assert replaced(model) == 0


@torch.no_grad()
def test_transposed_product_is_used_only_for_few_rows(monkeypatch):
    layer, used = Linear(16, 8), []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *pair: used.append(pair[0]) or mm(*pair))
    with fast_few_rows(layer):
        for rows in range(1, MOST_ROWS + 2):
            layer(torch.randn(rows, 16))
            assert len(used) == min(rows, MOST_ROWS) - 1
    assert all(first is layer.weight for first in used)
