"""KVzap (Jeblick and Jegou, 2026, arXiv 2601.07891): KVzip foretold while reading once."""

import os
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.policies.base import Need
from snapkv.policies.gate import Gate, read_gate
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.states import PromptLayer


@dataclass(frozen=True)
class KVzap(PrefixPolicy):
    """A fitted gate predicts what `KVzip(plus=True)` would keep, without its second reading.

    The idea is KVzap's: a linear map per layer to the logarithms of the scores of KVzip+, here
    fitted by ridge regression (`snapkv study fit-gate`). Where the authors' map reads the hidden
    state before attention, this one reads what the cache has of a token, see
    `snapkv.policies.gate.features`: its key before rotary embedding, its value, and where it
    stands. `AdaKV(KVzap(...))` lets heads keep different numbers; the authors keep what scores
    above a threshold, and also evict while generating, here all of that stays. A token stands where
    its row's count says, from 0: with `position_ids` of one's own the gate looks at keys that it
    does not know.

    Without a gate `CompressedCache` takes what the study has found of the model.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        gate: a file that `snapkv study fit-gate` has written, or a `snapkv.policies.gate.Gate`.
        sink_tokens: first tokens that every head keeps, 4 as in KVzip.

    Raises:
        InvalidArgumentError: a value out of range, or a file that holds no gate.
        InvalidTypeError: a value of the wrong type.
    """

    name: ClassVar[str] = "kvzap"
    compares_layers: ClassVar[bool] = True
    query_tokens: ClassVar[int] = 0
    needs: ClassVar[frozenset[Need]] = frozenset({"rotation"})

    _: KW_ONLY
    gate: Gate | str | os.PathLike[str] | None = field(default=None, repr=False)
    sink_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate is not None:
            object.__setattr__(self, "gate", read_gate(self.gate))

    def score(self, layer: PromptLayer) -> Tensor:
        """The logarithm of what KVzip+ should give: (B, Hkv, P) float32."""
        if not isinstance(self.gate, Gate):
            raise InvalidArgumentError(
                "gate: expected one of this model, got none; pass a file that snapkv study "
                "fit-gate has written"
            )
        return self.gate.log_scores(layer)[..., : layer.keys.shape[2] - self.window_size]
