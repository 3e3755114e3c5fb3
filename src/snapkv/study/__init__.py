"""The paper's observations, on any model. Importing them loads neither torch nor data."""

from snapkv.study.base import Study
from snapkv.study.hit_rate import HitRate
from snapkv.study.instructions import Instructions
from snapkv.study.overlap import Overlap
from snapkv.study.position import Position
from snapkv.study.sensitivity import Sensitivity

STUDIES: dict[str, type[Study]] = {
    study.name: study for study in (HitRate, Overlap, Instructions, Position, Sensitivity)
}
"""Every study by the name it has on the command line."""

__all__ = ["HitRate", "Instructions", "Overlap", "Position", "STUDIES", "Sensitivity", "Study"]
