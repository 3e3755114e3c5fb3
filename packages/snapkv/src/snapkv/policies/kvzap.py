"""KVzap (Jeblick and Jegou, 2026, arXiv 2601.07891): predict KVzip's scores in one reading."""

import os
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from torch import Tensor

from snapkv.errors import wrong
from snapkv.policies.base import Need
from snapkv.policies.gate import Gate, read_gate
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.states import PromptLayer


@dataclass(frozen=True)
class KVzap(PrefixPolicy):
    """A method that predicts the scores of `KVzip(plus=True)`, without reading the text twice.

    The idea is KVzap's: a linear map per layer to the logarithms of the scores of KVzip+, here
    fitted by ridge regression (`snapkv study fit-gate`). The authors' map reads the hidden state
    before attention. This one reads what the cache holds of a token, see
    `snapkv.policies.gate.features`: its key before rotary embedding, its value, and its position.
    `AdaKV(KVzap(...))` lets heads keep different numbers. The authors keep what scores above a
    threshold and also evict during decoding; here all generated tokens stay. The gate takes
    positions that count from 0 in each row; with other `position_ids` it reads keys that it was not
    fitted to.

    Without a gate `CompressedCache` uses the one that the study has stored for the model.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        gate: a file that `snapkv study fit-gate` has written, or a `snapkv.policies.gate.Gate`.
        sink_tokens: first tokens that every head keeps, 4 as in KVzip.

    Raises:
        InvalidArgumentError: a value is out of range, or a file holds no gate.
        InvalidTypeError: a value has the wrong type.
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
        """Predict the logarithm of the score that KVzip+ would give to each position.

        Returns:
            (B, Hkv, P) float32.

        Raises:
            InvalidArgumentError: there is no gate, or it was fitted to a model with other sizes.
        """
        if not isinstance(self.gate, Gate):
            remedy = "Use a file that was written by `snapkv study fit-gate`"
            raise wrong(
                "gate", "expected a gate that was trained for this model, but got none", remedy
            )
        return self.gate.log_scores(layer)[..., : layer.keys.shape[2] - self.window_size]
