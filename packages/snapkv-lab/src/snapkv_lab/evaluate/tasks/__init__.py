"""The experiments by name; one file per task. Importing them loads neither torch nor data."""

from snapkv_lab.evaluate.task import Task
from snapkv_lab.evaluate.tasks.instructions import Instructions
from snapkv_lab.evaluate.tasks.lines import Lines
from snapkv_lab.evaluate.tasks.longbench import LongBench
from snapkv_lab.evaluate.tasks.needle import Needle
from snapkv_lab.evaluate.tasks.rag import RagCitation, RagPipeline, RagPosition
from snapkv_lab.evaluate.tasks.ruler import Ruler
from snapkv_lab.evaluate.tasks.turns import Turns

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Needle,
        Lines,
        Instructions,
        Turns,
        LongBench,
        Ruler,
        RagCitation,
        RagPosition,
        RagPipeline,
    )
}
"""Every task by the name it has on the command line."""

__all__ = [
    "Instructions",
    "Lines",
    "LongBench",
    "Needle",
    "RagCitation",
    "RagPipeline",
    "RagPosition",
    "Ruler",
    "TASKS",
    "Turns",
]
