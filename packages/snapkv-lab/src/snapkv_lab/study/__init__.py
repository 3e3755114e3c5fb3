"""The paper's observations, on any model. Importing them loads neither torch nor data."""

from snapkv_lab.study.attention import HitRate, Instructions, Overlap, Position
from snapkv_lab.study.base import Study
from snapkv_lab.study.early_layer import EarlyLayer
from snapkv_lab.study.gate import FitGate
from snapkv_lab.study.sensitivity import Sensitivity

STUDIES: dict[str, type[Study]] = {
    study.name: study
    for study in (
        HitRate,
        Overlap,
        Instructions,
        Position,
        Sensitivity,
        EarlyLayer,
        FitGate,
    )
}
"""Every study by the name it has on the command line."""

__all__ = [
    "EarlyLayer",
    "FitGate",
    "HitRate",
    "Instructions",
    "Overlap",
    "Position",
    "STUDIES",
    "Sensitivity",
    "Study",
]
