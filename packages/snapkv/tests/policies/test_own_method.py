"""Scores of a user-defined method are used as they are, or refused by name."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from snapkv import AdaKV, CompressedCache, CriticalKV, InvalidArgumentError
from snapkv.policies import PrefixPolicy
from tests.families import call, random_ids, tiny_model


@dataclass(frozen=True)
class Own(PrefixPolicy):
    name: ClassVar[str] = "own"
    query_tokens: ClassVar[int] = 0
    scored_by: Callable[..., Any] = torch.Tensor.float

    def score(self, layer):
        return self.scored_by(layer.keys[:, :, : -self.window_size, 0])


def around(how):
    return how if callable(how) else lambda policy: policy


@pytest.mark.parametrize("wrapped", [None, AdaKV, CriticalKV], ids=["alone", "adakv", "criticalkv"])
@pytest.mark.parametrize(
    ("scored_by", "got"),
    [
        (lambda scores: scores[..., None], r"\(2, 2, 52, 1\)"),
        (lambda scores: torch.nn.functional.pad(scores, (0, 8)), r"\(2, 2, 60\)"),
        (lambda scores: scores[:, [0, 1, 1]], r"\(2, 3, 52\)"),
        (lambda scores: scores[:1], r"\(1, 2, 52\)"),
        (lambda scores: scores.long(), r"\(2, 2, 52\) of torch\.int64"),
        (lambda scores: scores.tolist(), "list"),
        (lambda scores: None, "NoneType"),
    ],
    ids=["axes", "window", "heads", "rows", "integers", "list", "none"],
)
def test_scores_of_wrong_shape_or_type_are_refused(wrapped, scored_by, got):
    model = tiny_model("llama")
    policy = around(wrapped)(Own(24, window_size=8, scored_by=scored_by))
    cache = CompressedCache(model, policy)
    with pytest.raises(InvalidArgumentError, match=rf"score: expected .*\(2, 2, 52\).*got {got}"):
        call(model, cache, random_ids(2, 60))


@pytest.mark.parametrize("wrapped", [None, AdaKV, CriticalKV], ids=["alone", "adakv", "criticalkv"])
def test_nan_scores_are_refused_with_the_name_of_the_method(wrapped):
    """Only one layer has NaN scores, which are checked after the last layer."""
    asked = iter(range(100))

    def in_the_second_layer(scores):
        return scores * torch.nan if next(asked) == 1 else scores.float()

    model = tiny_model("llama")
    cache = CompressedCache(
        model, around(wrapped)(Own(24, window_size=8, scored_by=in_the_second_layer))
    )
    with pytest.raises(InvalidArgumentError, match=r"^score: the method own returned"):
        call(model, cache, random_ids(2, 60))
    assert next(asked) == 4
    cache.reset()
    call(model, cache, random_ids(2, 60))
    assert cache.report().kept_tokens == 24


@pytest.mark.parametrize("pads", [0, 9])
def test_padding_may_have_any_score(pads):
    model, ids = tiny_model("llama"), random_ids(1, 60)
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0

    def no_numbers_first(scores):
        return scores.float().index_fill(2, torch.arange(9), torch.nan)

    cache = CompressedCache(model, Own(24, window_size=8, scored_by=no_numbers_first))
    with contextlib.nullcontext() if pads else pytest.raises(InvalidArgumentError, match="NaN"):
        call(model, cache, ids, attention_mask=mask)
