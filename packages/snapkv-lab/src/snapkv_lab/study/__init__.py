"""The paper's observations, on any model. Importing them loads neither torch nor data."""

from snapkv_lab.study.attention import HitRate as HitRate
from snapkv_lab.study.attention import Instructions as Instructions
from snapkv_lab.study.attention import Overlap as Overlap
from snapkv_lab.study.attention import Position as Position
from snapkv_lab.study.base import Study as Study
from snapkv_lab.study.gate import FitGate as FitGate
from snapkv_lab.study.sensitivity import Sensitivity as Sensitivity

_ALL = (HitRate, Overlap, Instructions, Position, Sensitivity, FitGate)
STUDIES: dict[str, type[Study]] = {study.name: study for study in _ALL}
"""Every study by its name on the command line."""
