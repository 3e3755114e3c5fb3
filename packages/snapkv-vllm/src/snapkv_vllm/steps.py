"""What a scheduler sends to its workers with every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from vllm.v1.core.sched.output import SchedulerOutput

from snapkv_vllm.admission.plans import Order


@dataclass
class CompressingStep(SchedulerOutput):
    """A step as vLLM's scheduler describes it, and what it compresses.

    Attributes:
        snapkv_orders: what to compress, by request.
        snapkv_dropped: how many tokens were dropped of the history that a request begins with, by
            request.
        snapkv_forgotten: the histories that are gone, by their first blocks.
    """

    snapkv_orders: Mapping[str, Order] = field(default_factory=dict)
    snapkv_dropped: Mapping[str, int] = field(default_factory=dict)
    snapkv_forgotten: Sequence[int] = ()

    @classmethod
    def extend(cls, output: SchedulerOutput, **own: Any) -> Self:
        """Return a step of vLLM's with `own` added to it, which shares all of its parts."""
        return cls(**vars(output) | own)
