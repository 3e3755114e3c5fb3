"""The paper's observations, on any model. Importing them loads neither torch nor data."""

from snapkv.lab.study.base import Study
from snapkv.lab.study.early_layer import EarlyLayer
from snapkv.lab.study.heads import Heads
from snapkv.lab.study.hit_rate import HitRate
from snapkv.lab.study.induction import Induction
from snapkv.lab.study.instructions import Instructions
from snapkv.lab.study.overlap import Overlap
from snapkv.lab.study.position import Position
from snapkv.lab.study.sensitivity import Sensitivity

STUDIES: dict[str, type[Study]] = {
    study.name: study
    for study in (
        HitRate,
        Overlap,
        Instructions,
        Position,
        Sensitivity,
        Induction,
        EarlyLayer,
        Heads,
    )
}
"""Every study by the name it has on the command line."""

__all__ = [
    "EarlyLayer",
    "Heads",
    "HitRate",
    "Induction",
    "Instructions",
    "Overlap",
    "Position",
    "STUDIES",
    "Sensitivity",
    "Study",
]
