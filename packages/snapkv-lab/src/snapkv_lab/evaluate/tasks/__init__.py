"""The tasks of the evaluation by name. Importing them loads neither torch nor data."""

from snapkv_lab.evaluate.task import Task
from snapkv_lab.evaluate.tasks.instructions import Instructions as Instructions
from snapkv_lab.evaluate.tasks.lines import Lines as Lines
from snapkv_lab.evaluate.tasks.longbench import LongBench as LongBench
from snapkv_lab.evaluate.tasks.needle import Needle as Needle
from snapkv_lab.evaluate.tasks.rag import RagCitation as RagCitation
from snapkv_lab.evaluate.tasks.rag import RagPipeline as RagPipeline
from snapkv_lab.evaluate.tasks.rag import RagPosition as RagPosition
from snapkv_lab.evaluate.tasks.ruler import Ruler as Ruler
from snapkv_lab.evaluate.tasks.turns import Turns as Turns

_OF_RAG = (RagCitation, RagPosition, RagPipeline)
_ALL = (Needle, Lines, Instructions, Turns, LongBench, Ruler, *_OF_RAG)
TASKS: dict[str, type[Task]] = {task.name: task for task in _ALL}
"""Every task by its name on the command line."""
