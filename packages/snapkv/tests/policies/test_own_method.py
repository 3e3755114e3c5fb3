"""A method of somebody's own: what it returns is used as it has to be, or refused by name."""

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
def test_scores_of_another_shape_or_kind_are_refused(wrapped, scored_by, got):
    model = tiny_model("llama")
    policy = around(wrapped)(Own(24, window_size=8, scored_by=scored_by))
    cache = CompressedCache(model, policy)
    with pytest.raises(InvalidArgumentError, match=rf"score: expected \(2, 2, 52\).*got {got}"):
        call(model, cache, random_ids(2, 60))


def test_right_scores_choose():
    model = tiny_model("llama")
    cache = CompressedCache(model, Own(24, window_size=8))
    call(model, cache, random_ids(2, 60))
    assert cache.report().kept_tokens == 24
