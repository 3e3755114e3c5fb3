"""The experiments by name; one file per task. Importing them loads neither torch nor data."""

from snapkv.lab.evaluate.task import Task
from snapkv.lab.evaluate.tasks.functions import Functions
from snapkv.lab.evaluate.tasks.instructions import Instructions
from snapkv.lab.evaluate.tasks.lines import Lines
from snapkv.lab.evaluate.tasks.longbench import LongBench
from snapkv.lab.evaluate.tasks.needle import Needle
from snapkv.lab.evaluate.tasks.rag import RagCitation, RagPipeline, RagPosition
from snapkv.lab.evaluate.tasks.ruler import Ruler
from snapkv.lab.evaluate.tasks.tracking import Tracking
from snapkv.lab.evaluate.tasks.turns import Turns

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Needle,
        Lines,
        Instructions,
        Tracking,
        Turns,
        Functions,
        LongBench,
        Ruler,
        RagCitation,
        RagPosition,
        RagPipeline,
    )
}
"""Every task by the name it has on the command line."""

__all__ = [
    "Functions",
    "Instructions",
    "Lines",
    "LongBench",
    "Needle",
    "RagCitation",
    "RagPipeline",
    "RagPosition",
    "Ruler",
    "TASKS",
    "Tracking",
    "Turns",
]
