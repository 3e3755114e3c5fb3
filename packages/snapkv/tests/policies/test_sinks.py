"""Sinks: the first tokens of a row are kept in every head, within the budget, by every method."""

import dataclasses

import pytest
import torch

from snapkv import InvalidArgumentError
from snapkv.policies import AdaKV, CriticalKV, KVzip, PrefixPolicy
from tests.ops.states import rated_layer


def rated(*heads):
    return rated_layer(heads, output_weight=torch.ones(1, len(heads)))


def kept(policy, layer):
    return policy.select(layer).keep_indices.tolist()


WRAPPERS = {
    "itself": lambda policy: policy,
    "adakv": lambda policy: AdaKV(policy, safeguard=0.01),
    "criticalkv": CriticalKV,
    "criticalkv, by values": lambda policy: CriticalKV(policy, first_share=1e-9),
    "adakv of criticalkv": lambda policy: AdaKV(CriticalKV(policy), safeguard=0.01),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_sinks_with_the_lowest_scores_are_kept_in_every_head_and_row(wrap):
    """Each row has two sinks, and the second row begins with padding."""
    layer = rated_layer(
        [[[0.0, 0.0, 0.9, 0.3, 0.8, 0.0]], [[0.9, 0.0, 0.0, 0.3, 0.8, 0.0]]],
        output_weight=torch.ones(1, 1),
        pad_tokens=torch.tensor([0, 1]),
    )
    policy = wrap(KVzip(4, window_size=1, sink_tokens=2))
    assert kept(policy, layer) == [[[0, 1, 2, 5]], [[1, 2, 4, 5]]]


def test_adakv_distributes_the_budget_that_the_sinks_leave():
    """The sinks take two of four places, and one head has the best scores for the other two."""
    layer = rated([0.0, 0.1, 0.9, 0.3, 0.8, 0.0], [0.0, 0.2, 0.1, 0.1, 0.0, 0.0])
    selection = AdaKV(KVzip(3, window_size=1, sink_tokens=1), safeguard=0.1).select(layer)
    assert selection.keep_indices.tolist() == [[[0, 2, 4, 5], [-1, -1, 0, 5]]]
    assert selection.head_tokens.tolist() == [[4, 2]]


def test_user_defined_method_has_sinks_if_it_declares_sink_tokens():
    @dataclasses.dataclass(frozen=True)
    class Latest(PrefixPolicy):
        name = "latest"
        sink_tokens: int = dataclasses.field(default=2, kw_only=True)

        @property
        def query_tokens(self):
            return 0

        def score(self, layer):
            return layer.received[..., : -self.window_size]

    layer = rated([0.0, 0.1, 0.2, 0.3, 0.4, 0.0])
    assert kept(Latest(4, window_size=1), layer) == [[[0, 1, 4, 5]]]
    with pytest.raises(InvalidArgumentError, match="sink_tokens: expected a value of at least 0"):
        Latest(4, window_size=1, sink_tokens=-1)
