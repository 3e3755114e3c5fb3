"""Selections of a user-defined method are used as they are, or refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from snapkv import (
    TOVA,
    AcrossLayers,
    CompressedCache,
    InvalidArgumentError,
    PromptThenDecode,
    SnapKV,
)
from snapkv.policies import Policy, PrefixPolicy, Selection
from tests.families import call, random_ids, read, require_integrity, tiny_model

TOKENS, KEPT = 60, 20


@dataclass(frozen=True)
class Chosen(Policy):
    """A method that returns `made_by(layer, indices)`, where `indices` would be right."""

    name: ClassVar[str] = "chosen"
    query_tokens: ClassVar[int] = 0
    most_tokens: ClassVar[int] = KEPT
    made_by: Callable[..., Any] = Selection.of

    def select(self, layer):
        return self.made_by(layer, right_indices(layer))


@dataclass(frozen=True)
class Budgeted(Chosen):
    """A `Chosen` with a budget, so that it can compress later turns."""

    budget: ClassVar[int] = KEPT


@dataclass(frozen=True)
class Stacked(Chosen):
    """A `Chosen` that selects for several layers at once."""

    can_select_stacked: ClassVar[bool] = True


@dataclass(frozen=True)
class WithWindow(PrefixPolicy):
    """A method like `Chosen` of a class that must keep the window."""

    name: ClassVar[str] = "with-window"
    query_tokens: ClassVar[int] = 0
    made_by: Callable[..., Any] = Selection.of

    def score(self, layer):
        raise AssertionError("it selects without scores")

    def select(self, layer):
        return self.made_by(layer, right_indices(layer))


def right_indices(layer):
    T = layer.keys.shape[2]
    return torch.arange(T - KEPT, T).expand(*layer.keys.shape[:2], -1).clone()


def with_entries(*changes):
    """Return a function that changes some indices of the last row and head."""

    def made_by(layer, indices):
        for place, index in changes:
            indices[-1, -1, place] = index
        return Selection.of(layer, indices)

    return made_by


def with_indices(change):
    return lambda layer, indices: Selection.of(layer, change(indices))


def saying(**noted):
    return lambda layer, indices: Selection(
        **{"keep_indices": indices, "prompt_tokens": layer.keys.shape[2], **noted}
    )


def counting_a_filler(layer, indices):
    indices[..., 0] = -1
    return saying(head_tokens=torch.full((2, 2), KEPT))(layer, indices)


WRONG = {
    "unsorted": (
        with_entries((3, 44), (4, 43)),
        "indices that are not in ascending order",
        "Sort keep_ind",
    ),
    "descending": (
        with_indices(lambda each: each.flip(-1)),
        "not in ascending order",
        "Sort keep_ind",
    ),
    "duplicate": (
        with_entries((3, 44)),
        "the same index twice",
        "Return each position only once for each head",
    ),
    "negative": (with_entries((3, -2)), "negative indices", "padding_slots"),
    "a leading -1 that is not counted": (with_entries((0, -1)), "negative ind", "padding_slots"),
    "beyond": (with_entries((19, TOKENS)), "indices of 60 or more", "layer.keys"),
    "far beyond": (with_entries((19, 10**12)), "indices of 60 or more", "layer.keys"),
    "axes": (with_indices(lambda each: each[0]), r"shape \(2, 20\) for 2 rows", "Return "),
    "rows": (with_indices(lambda each: each[:1]), r"shape \(1, 2, 20\) for 2 rows", "Return "),
    "heads": (with_indices(lambda each: each[:, [0, 1, 1]]), r"shape \(2, 3, 20\)", "Return "),
    "query heads": (
        with_indices(lambda each: each.repeat_interleave(4, dim=1)),
        r"shape \(2, 8, 20\)",
        "Return ",
    ),
    "int32": (with_indices(torch.Tensor.int), "keep_indices of torch.int32", "an int64 tensor"),
    "floats": (with_indices(torch.Tensor.float), "keep_indices of torch.float32", "an int64"),
    "a list": (saying(keep_indices=[1, 2]), "keep_indices of list", "an int64"),
    "a tensor alone": (lambda layer, indices: indices, "a Tensor", "Return a Selection"),
    "another prompt": (saying(prompt_tokens=7), "prompt_tokens=7, but .* has 60", "layer.keys"),
    "counts beyond": (
        saying(head_tokens=torch.tensor([[20, 20], [20, 21]])),
        "head_tokens that are negative or larger",
        "In padding_slots, count",
    ),
    "counts of other rows": (saying(head_tokens=torch.tensor([[9]])), "head_tokens of", "Pass"),
    "counts that include a -1": (counting_a_filler, "negative indices", "head_tokens"),
    "padding beyond": (saying(padding_slots=torch.tensor([0, 21])), "negative or larger", "count"),
    "counts in a list": (saying(head_tokens=[[9, 9]] * 2), "head_tokens of list", "tensor of int"),
    "counts that are not whole": (
        saying(head_tokens=torch.full((2, 2), 9.5)),
        "head_tokens of shape .* and torch.float32",
        "tensor of integers",
    ),
    "padding in a list": (saying(padding_slots=[0, 0]), "padding_slots of list", "tensor of int"),
    "padding that is not whole": (
        saying(padding_slots=torch.tensor([0.0, 1.5])),
        "padding_slots of shape .* and torch.float32",
        "tensor of integers",
    ),
    "padding of other rows": (
        saying(padding_slots=torch.zeros(3).long()),
        r"shape \(3,\)",
        "tensor of integers",
    ),
}


@pytest.mark.parametrize("name", [*WRONG, "a list, then tova"])
def test_wrong_selection_is_refused_with_its_problem_and_remedy(name):
    name, _, then = name.partition(", then")
    made_by, said, remedy = WRONG[name]
    policy = Chosen(made_by)
    if then:
        policy = PromptThenDecode(prompt=policy, decode=TOVA(64))
    cache = CompressedCache(tiny_model("llama"), policy)
    line = rf"^select: expected .* from Chosen in layer .*, but got .*{said}.*\. .*{remedy}"
    with pytest.raises(InvalidArgumentError, match=line):
        call(cache.model, cache, random_ids(2, TOKENS))


@pytest.mark.parametrize("counts", [[[0, 0], [0, 0]], [[3, 7], [1, 0]], [[20, 2], [5, 5]]])
def test_entries_that_no_head_keeps_are_ignored(counts):
    """The whole prompt counts as seen, even if no head keeps as many entries as were returned."""
    made_by = saying(head_tokens=torch.tensor(counts))
    cache = read(tiny_model("llama"), Chosen(made_by), random_ids(2, TOKENS))
    call(cache.model, cache, random_ids(2, 1))
    for layer in cache.prompt_state.layers:
        require_integrity(layer)
    held = (cache.kept_positions(0) >= 0).sum(dim=-1) - 1
    assert (cache.get_seq_length(), held.tolist()) == (TOKENS + 1, counts)


def test_error_names_the_layer_and_the_cache_works_after_reset():
    layers = []

    def wrong_in_the_third(layer, indices):
        layers.append(layer.layer_idx)
        return Selection.of(layer, indices.flip(-1) if layers == [0, 1, 2] else indices)

    cache = CompressedCache(tiny_model("llama"), Chosen(wrong_in_the_third))
    with pytest.raises(InvalidArgumentError, match=r"from Chosen in layer 2, but got .*\. Sort"):
        call(cache.model, cache, random_ids(2, TOKENS))
    assert layers == [0, 1, 2, 3]  # a GPU is waited for behind the last one
    cache.reset()
    call(cache.model, cache, random_ids(2, TOKENS))
    assert cache.report().kept_tokens == KEPT


def test_error_of_stacked_layers_names_the_layer_with_the_wrong_selection():
    def wrong_in_the_third(layer, indices):
        assert layer.stacked == 4
        indices[5, 1, 3] = 44  # of two rows in each layer
        return Selection.of(layer, indices)

    cache = CompressedCache(tiny_model("llama"), Stacked(wrong_in_the_third))
    with pytest.raises(
        InvalidArgumentError, match=r"from Stacked in layer 2, but got the same index twice"
    ):
        call(cache.model, cache, random_ids(2, TOKENS))


@pytest.mark.parametrize("turns", ["compress", "recall"])
def test_wrong_selection_of_a_later_turn_is_refused(turns):
    calls = []

    def wrong_later(layer, indices):
        calls.append(layer)
        return with_entries(*[(3, 0)] * (len(calls) > 4))(layer, indices)

    cache = read(tiny_model("llama"), Budgeted(wrong_later), random_ids(1, TOKENS), turns=turns)
    cache.expect_prompt(TOKENS + 9)
    with pytest.raises(
        InvalidArgumentError, match=r"from Budgeted in layer .* not in ascending order"
    ):
        call(cache.model, cache, random_ids(1, 9))


@pytest.mark.parametrize("change", [lambda each: each - KEPT, lambda each: each[..., :0]])
def test_selection_without_the_promised_window_is_refused(change):
    policy = WithWindow(24, window_size=8, made_by=with_indices(change))
    said = r"in layer 0, but got fewer tokens than the window of the last 8.*inherit from Policy"
    with pytest.raises(InvalidArgumentError, match=said):
        read(tiny_model("llama"), policy, random_ids(2, TOKENS))


def by_heads(layer, indices):
    """Select different numbers of tokens for each head; 9 tokens of a row may be padding."""
    kept = torch.zeros(2, 2, TOKENS, dtype=torch.bool)
    kept[0, 0, 30:50] = kept[1, :, 40:] = True
    kept[0, 1, [10, 59]] = True
    return Selection.of_mask(kept, per_head_budget=True)


def fewer_in_a_row(layer, indices):
    kept = torch.zeros(2, 2, TOKENS, dtype=torch.bool)
    kept[0, :, 55:] = kept[1, :, 20:33] = True
    return Selection.of_mask(kept, per_head_budget=False)


RIGHT = {
    "even": Selection.of,
    "without the last tokens": with_indices(lambda each: each - KEPT),
    "heads": by_heads,
    "rows": fewer_in_a_row,
    "one set": with_indices(lambda each: each[:, :1]),
    "whole": lambda layer, indices: Selection.keep_all(layer),
    "none": lambda layer, indices: None,
}


@pytest.mark.parametrize("pads", [0, 9])
@pytest.mark.parametrize("made_by", RIGHT.values(), ids=RIGHT)
def test_right_selection_is_accepted(made_by, pads):
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[0, :pads] = 0
    read(tiny_model("llama"), Chosen(made_by), random_ids(2, TOKENS), mask)


def test_selection_of_padding_is_refused():
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :50] = 0
    with pytest.raises(InvalidArgumentError, match=r"got indices of padding among .*pad_tokens"):
        read(tiny_model("llama"), Chosen(saying()), random_ids(2, TOKENS), mask)


@dataclass(frozen=True)
class Infinite(SnapKV):
    """Scores that are infinite for more tokens than the budget allows."""

    def score(self, layer):
        return torch.full_like(super().score(layer), torch.inf)


def test_infinite_scores_across_layers_do_not_evict_the_window_of_any_head():
    cache = read(
        tiny_model("llama"), AcrossLayers(Infinite(KEPT, window_size=4)), random_ids(2, 60)
    )
    kept = [cache.kept_positions(layer) for layer in cache.compressed_layers]
    window = torch.arange(TOKENS - 4, TOKENS)
    assert all((each[..., -4:] == window).all() for each in kept)
    assert cache.report().chosen_tokens == KEPT
