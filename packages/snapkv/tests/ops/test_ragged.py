"""Attention to heads of different lengths: a reference, and implementations that equal it."""

from dataclasses import replace

import pytest
import torch

from snapkv import InvalidArgumentError
from snapkv.ops import AttentionStates, RaggedLayout, attention_weights, choice, ragged_attention
from snapkv.ops.ragged import api as ragged
from tests.ops.ragged_cases import (
    LENGTHS,
    OPTIONS,
    QUERIES,
    attended,
    eager,
    require_no_more_error_than_eager,
    require_reference,
    states,
    wide,
    with_options,
)

FAST = ("flash", "blocked")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("queries", QUERIES)
def test_reference_attention_equals_that_of_each_head_alone(queries, options):
    lengths = LENGTHS["tiny"]
    arguments = with_options(states(lengths, queries), options)
    scores = arguments["score_options"]
    got, start = attended(ragged_attention, arguments, impl="reference"), 0
    for row in range(2):
        for head in range(2):
            stop = start + lengths[row][head]
            keys = torch.cat([arguments["keys"][start:stop], arguments["tail_keys"][row, head]])
            tail = arguments["tail_values"][row, head]
            values = torch.cat([arguments["values"][start:stop], tail])
            start = stop
            mine = slice(2 * head, 2 * head + 2)
            own = scores
            if scores.sink_logits is not None:
                own = replace(scores, sink_logits=scores.sink_logits[mine])
            asked = AttentionStates(arguments["queries"][row, mine][None], keys[None, None], own)
            weights = attention_weights(asked)[0]
            torch.testing.assert_close(got[row, mine], weights @ values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", FAST)
def test_ragged_attention_equals_the_reference(impl):
    require_reference(impl)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("narrow", [("values",), ("keys", "values"), ("queries", "tail_values")])
def test_states_of_mixed_dtypes_are_computed_in_the_widest_dtype(impl, narrow):
    """Under autocast, rotation returns float32 keys, while values keep their dtype."""
    given = states(LENGTHS["whole blocks"], 3, dim_v=20)
    given |= {name: given[name].bfloat16() for name in narrow}
    wide = given | {name: given[name].float() for name in narrow}
    assert torch.equal(
        attended(ragged_attention, given, impl=impl), attended(ragged_attention, wide, impl=impl)
    )


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_error_is_at_most_twice_that_of_eager_attention(impl, dtype):
    require_no_more_error_than_eager(impl, dtype)


def test_flash_refuses_unsupported_inputs_and_auto_uses_blocked_for_them():
    plain = states(LENGTHS["whole blocks"], 3, dim_v=20)
    wanting = {**plain, "queries": plain["queries"].clone().requires_grad_()}
    for given, why in (
        (with_options(plain, OPTIONS["softcap"]), "capped scores"),
        (states(LENGTHS["whole blocks"], 3), "values of another width"),
        (states(LENGTHS["tiny"], 3, dim_v=20), "heads that hold nothing"),
        (wanting, "gradients"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"'flash' .*{why}"):
            attended(ragged_attention, given, impl="flash")
        same = attended(ragged_attention, given, impl="blocked")
        assert torch.equal(attended(ragged_attention, given), same)


def test_gradients_equal_those_of_eager_attention():
    names = ("queries", "keys", "values", "tail_keys", "tail_values")
    found = []
    for attend in (lambda given: attended(ragged_attention, given), eager):
        arguments = wide(states(LENGTHS["one past a block"], 3))
        for name in names:
            arguments[name].requires_grad_()
        attend(arguments).square().sum().backward()
        found.append([arguments[name].grad for name in names])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_token_is_in_exactly_one_piece_of_its_head(lengths):
    layout, total = RaggedLayout(lengths, torch.device("cpu")), sum(map(sum, lengths))
    blocks, edges = layout.pieces.cut(torch.arange(total)[:, None])
    shown = torch.cat([blocks, edges])[..., 0].masked_fill(layout.pieces.hidden[:, 0], -1)
    for head, (start, stop) in enumerate(zip(layout.starts, layout.starts[1:], strict=False)):
        mine = shown[layout.pieces.heads == head]
        assert mine[mine >= 0].sort().values.tolist() == list(range(start, stop))


def test_auto_chooses_the_implementation_by_size(monkeypatch):
    taken = []
    for impl in FAST:
        monkeypatch.setitem(ragged._IN_TORCH, impl, lambda *a, i=impl, **o: taken.append(i))
    for tokens, queries in ((64, 1), (ragged.FLASH_ELEMENTS // 20 + 1, 1), (70_000, 2)):
        attended(ragged_attention, states(((tokens, 1), (1, 1)), queries, dim_v=20))
    assert taken == ["flash", "blocked", "flash"]


on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("impl", [pytest.param("triton", marks=on_cuda)])
def test_kernel_on_a_gpu_equals_the_reference(impl):
    require_reference(impl, "cuda")
    for dtype in (torch.bfloat16, torch.float16):
        require_no_more_error_than_eager(impl, dtype, "cuda")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_auto_uses_the_kernel_on_a_gpu_unless_gradients_are_needed(device, monkeypatch):
    arguments, said = states(LENGTHS["tiny"], 1, device=device), []
    monkeypatch.setattr(choice, "log_choice", lambda operation, impl, where: said.append(impl))
    attended(ragged_attention, arguments)
    with_gradients = {**arguments, "queries": arguments["queries"].requires_grad_()}
    with pytest.raises(InvalidArgumentError, match="gradients"):
        attended(ragged_attention, with_gradients, impl="triton")
    attended(ragged_attention, with_gradients)
    assert said == ["triton", "blocked"]


@pytest.mark.parametrize("queries", [3, 40])
@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_queries_of_a_tree_attend_as_if_their_path_were_alone(impl, queries):
    """The output of a query equals the one after reading only its ancestors and itself."""
    lengths, dim_v = (((5, 2), (1, 7)), 20) if impl == "flash" else (LENGTHS["tiny"], 6)
    arguments = states(lengths, queries, dim_v=dim_v)
    parents = [0, *(max(0, node - 1 - node % 3) for node in range(1, queries))]
    visible = torch.eye(queries, dtype=torch.bool)
    for node in range(1, queries):
        visible[node] |= visible[parents[node]]
    tree = arguments | {"own_visible": visible}
    got = attended(ragged_attention, tree, impl=impl)
    past = arguments["tail_keys"].shape[2] - queries
    for node in range(queries):
        path = visible[node].nonzero()[:, 0]
        tail = torch.cat([torch.arange(past), past + path])
        alone = arguments | {
            "queries": arguments["queries"][:, :, path],
            "tail_keys": arguments["tail_keys"][:, :, tail],
            "tail_values": arguments["tail_values"][:, :, tail],
        }
        expected = attended(ragged_attention, alone, impl="reference")[:, :, -1]
        torch.testing.assert_close(got[:, :, node], expected, rtol=1e-4, atol=1e-5)


def test_layout_first_used_in_inference_mode_supports_gradients():
    arguments = states(LENGTHS["tiny"], 1)
    with torch.inference_mode():
        attended(ragged_attention, arguments, impl="blocked")
    arguments["values"].requires_grad_()
    attended(ragged_attention, arguments, impl="blocked").sum().backward()
    assert arguments["values"].grad.any()
