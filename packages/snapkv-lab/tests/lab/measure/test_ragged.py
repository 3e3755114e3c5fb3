"""Kernels that attend to heads of different length are handed the same heads."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import varlen

from snapkv_lab.measure.ragged import EVEN, KERNELS, RaggedHeads

CPU = torch.device("cpu")


def by_sequence(queries, keys, values, query_starts, key_starts, most_queries, most_keys):
    """As torch's varlen_attn, which needs a GPU, by its documentation."""
    assert query_starts.dtype == key_starts.dtype == torch.int32
    assert query_starts.diff().max() == most_queries
    assert key_starts.diff().max() == most_keys
    found = []
    for begin, end in zip(query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True):
        own = slice(*key_starts[len(found) : len(found) + 2].tolist())
        states = queries[begin:end], keys[own], values[own]
        found.append(F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in states)))
    return torch.cat(found, dim=1).transpose(0, 1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != EVEN])
def test_every_kernel_attends_to_the_same(kernel, rows, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", by_sequence)
    heads = RaggedHeads.drawn((rows, 4, 2, 32), 50, CPU, torch.float32)
    assert [sum(row) for row in heads.counts] == [4 * 50] * rows
    assert len({*heads.counts[0]}) > 1
    torch.testing.assert_close(heads.attention(kernel)(), heads.plainly())


def test_torchs_own_takes_what_it_is_handed():
    """Its stand-in for tensors without values, which a GPU's kernel stands behind."""
    drawn = RaggedHeads.drawn((3, 4, 2, 32), 50, CPU, torch.float32)
    states = (each.to("meta") for each in (drawn.queries, drawn.keys, drawn.values))
    heads = RaggedHeads(*states, drawn.counts)
    assert heads.attention("varlen_attn")().shape == drawn.queries.shape
