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
        snapkv_orders: the orders, by request id; requests without an order are left out.
        snapkv_dropped: how many tokens the history of a request has dropped, by request id, for
            requests that begin with such a history in this step.
        snapkv_forgotten: the numbers of first blocks whose recorded positions workers forget: those
            of removed histories, and of requests of sessions that were preempted or left no
            history.
    """

    snapkv_orders: Mapping[str, Order] = field(default_factory=dict)
    snapkv_dropped: Mapping[str, int] = field(default_factory=dict)
    snapkv_forgotten: Sequence[int] = ()

    @classmethod
    def extend(cls, output: SchedulerOutput, **own: Any) -> Self:
        """Return a copy of a step of vLLM in which the fields `own` are set. The copy shares all
        parts of `output`.
        """
        return cls(**vars(output) | own)
