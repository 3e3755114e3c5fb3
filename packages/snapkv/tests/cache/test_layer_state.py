"""Every field of a layer's state follows rows, crops, resets and files, and its bytes count."""

import copy
from dataclasses import dataclass, fields, replace
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from snapkv import CompressedCache, SnapKV
from snapkv.cache.rows import RowRecord, per_row
from snapkv.cache.slots import LayerState, SlotMap
from tests.families import call, random_ids, read, tiny_model

BUDGET, PROMPT, ANSWER = 24, 60, 5


@dataclass(frozen=True, kw_only=True)
class MoreState(LayerState):
    """A layer state with an additional field of every kind."""

    of_rows: Tensor | None = per_row()
    of_slots: Tensor | None = per_row(slot_axis=1)
    of_tokens: Tensor | None = per_row(token_axis=2)


NAMES = ("of_rows", "of_slots", "of_tokens")


def with_more_state(cache, rows=2):
    """Give every layer of the cache a `MoreState` whose numbers encode row and slot or token."""
    for layer in cache.layers:
        row = torch.arange(rows) * 100
        slots = layer.store.slots
        layer.state = MoreState(
            **{field.name: getattr(layer.state, field.name) for field in fields(LayerState)},
            of_rows=row[:, None],
            of_slots=row[:, None] + torch.arange(slots),
            of_tokens=row[:, None, None] + torch.arange(layer.seen_tokens),
        )
    return cache


@pytest.fixture
def cache():
    made = read(tiny_model("llama"), SnapKV(BUDGET, window_size=8), random_ids(2, PROMPT))
    call(made.model, made, random_ids(2, ANSWER, seed=1))
    return with_more_state(made)


def values(cache):
    return [{name: layer.state.tensors.get(name) for name in NAMES} for layer in cache.layers]


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ],
    ids=["reorder", "repeat", "select"],
)
def test_state_follows_reordered_repeated_and_selected_rows(cache, change, rows):
    before = values(cache)
    change(cache)
    for old, new in zip(before, values(cache), strict=True):
        for name in NAMES:
            assert torch.equal(new[name], old[name][rows]), name


def test_crop_of_a_copy_crops_its_state_and_not_the_state_of_the_original(cache):
    before, original = values(cache), cache
    cache = copy.copy(cache)
    cache.crop(-3)
    for old, same in zip(before, values(original), strict=True):
        assert all(torch.equal(old[name], same[name]) for name in NAMES)
    for old, new in zip(before, values(cache), strict=True):
        assert torch.equal(new["of_slots"], old["of_slots"][:, :-3])
        assert torch.equal(new["of_tokens"], old["of_tokens"][..., :-3])
        assert torch.equal(new["of_rows"], old["of_rows"])


def test_bytes_of_the_state_are_reported(cache):
    with_them = cache.report()["index_bytes"]
    added = sum(part.nbytes for each in values(cache) for part in each.values())
    for layer in cache.layers:
        layer.state = replace(layer.state, **dict.fromkeys(NAMES))
    assert with_them - cache.report()["index_bytes"] == added > 0


def test_lost_mass_does_not_count_as_held_bytes(cache):
    before = cache.report()["index_bytes"]
    for layer in cache.layers:
        assert layer.state.lost_mass is not None
        layer.state = replace(layer.state, lost_mass=None)
    assert cache.report()["index_bytes"] == before


def test_reset_clears_the_state(cache):
    cache.reset()
    assert values(cache) == [dict.fromkeys(NAMES)] * len(cache.layers)
    assert all(isinstance(layer.state, MoreState) for layer in cache.layers)


def test_saved_cache_restores_the_state(cache, tmp_path, monkeypatch):
    cache.save(tmp_path / "cache")
    monkeypatch.setattr("snapkv.cache.layer.LayerState", MoreState)
    loaded = CompressedCache.load(tmp_path / "cache", cache.model)
    for old, new in zip(values(cache), values(loaded), strict=True):
        assert all(torch.equal(new[name], old[name]) for name in NAMES)


@pytest.mark.parametrize("record", [LayerState, SlotMap])
def test_every_tensor_of_a_record_declares_its_axes(record):
    """Otherwise the tensor, or a record of tensors, would not follow the rows."""
    hints = get_type_hints(record)
    for field in fields(record):
        kinds = {hints[field.name], *get_args(hints[field.name])}
        classes = (kind for kind in kinds if isinstance(kind, type))
        follows = any(issubclass(kind, Tensor | RowRecord) for kind in classes)
        assert ("per_row" in field.metadata) is follows, field.name
    assert issubclass(record, RowRecord)
