"""The step that the scheduler sends to its workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from vllm.v1.core.sched.output import SchedulerOutput

from snapkv_vllm.admission.plans import Order


@dataclass
class CompressingStep(SchedulerOutput):
    """A step of vLLM's scheduler, together with the orders for the compressions that follow it.

    Attributes:
        snapkv_orders: the orders, by request.
        snapkv_dropped: how many tokens the history of a request has dropped, for requests that
            begin with one.
        snapkv_forgotten: the first block of each history that was removed.
    """

    snapkv_orders: Mapping[str, Order] = field(default_factory=dict)
    snapkv_dropped: Mapping[str, int] = field(default_factory=dict)
    snapkv_forgotten: Sequence[int] = ()

    @classmethod
    def extend(cls, output: SchedulerOutput, **own: Any) -> Self:
        """Return a copy of a step of vLLM with additional fields. The copy shares all parts of
        `output`.
        """
        return cls(**vars(output) | own)
