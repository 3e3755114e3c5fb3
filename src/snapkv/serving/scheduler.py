"""vLLM's schedulers, which also decide when a request is compressed."""

from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from snapkv.errors import SnapKVError
from snapkv.policies import Policy
from snapkv.serving.blocks import CompressedBlocks
from snapkv.serving.metrics import PromptMetrics
from snapkv.serving.orders import Order, order_for, reusable_tokens, step_end
from snapkv.serving.refusals import compressed_managers, require_supported
from snapkv.serving.settings import ServingSettings

logger = init_logger("vllm.snapkv")

ORDERS = "snapkv_orders"
"""Attribute of vLLM's `SchedulerOutput` that carries `Order`s to the workers, by request."""


class _CompressingScheduler(Scheduler):
    """Orders the compression of a prompt in the very step that computes its end.

    The blocks it frees may be given away at once: whoever gets them writes in a later step, and
    workers run steps in order, also where several are under way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_supported(self.vllm_config)
        self._settings = ServingSettings.from_config(self.vllm_config.additional_config)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._blocks = CompressedBlocks(compressed_managers(managers))
        self._metrics = PromptMetrics(self.vllm_config)
        self._policies: dict[str, Policy | None] = {}

    def add_request(self, request: Any) -> None:
        """Accept a request with the method it asks for; one with wrong settings ends at once."""
        try:
            self._policies[request.request_id] = self._policy_of(request)
        except SnapKVError as error:  # front ends answer 400; one of another make did not ask
            logger.error("Request %s is refused: %s", request.request_id, error)
            self.grammar_compile_error_reqs.add(request.request_id)  # ends with vLLM's next step
        super().add_request(request)

    def _policy_of(self, request: Any) -> Policy | None:
        """The request's method; none for sessions, whose prompts go on after their end."""
        params = request.sampling_params
        if params is None or request.resumable:
            return None
        return self._settings.for_request(params.extra_args)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._policies.pop(request.request_id, None)
        self._metrics.request_ended(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[Any, int, int, bool]:
        blocks, cached, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        usable = reusable_tokens(self._policies.get(request.request_id), request.num_prompt_tokens)
        if cached > usable:
            manager = self.kv_cache_manager
            found, cached, _ = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, usable
            )
            blocks = manager.create_kv_cache_blocks(found)
        return blocks, cached, boundary, diverged

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        if self._policies.get(request.request_id) is None:
            return tokens
        return step_end(request.num_prompt_tokens, num_computed_tokens, tokens)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        orders = {}
        for request_id, step_tokens in scheduler_output.num_scheduled_tokens.items():
            order = self._order(self.requests[request_id], step_tokens)
            if order is not None:
                orders[request_id] = order
        setattr(scheduler_output, ORDERS, orders)

    def _order(self, request: Any, step_tokens: int) -> Order | None:
        request_id = request.request_id
        if self._blocks.ended(request_id):
            return None
        order = order_for(
            self._policies.get(request_id),
            prompt_tokens=request.num_prompt_tokens,
            computed_tokens=request.num_computed_tokens,
            step_tokens=step_tokens,
        )
        if request.num_computed_tokens < request.num_prompt_tokens:
            return order
        return self._end_of_prompt(request, order)

    def _end_of_prompt(self, request: Any, order: Order | None) -> Order | None:
        """Free the blocks that the prompt no longer needs, and say so to the workers."""
        request_id, prompt_tokens = request.request_id, request.num_prompt_tokens
        if order is None:
            self._blocks.leave_whole(request_id)
            self._metrics.prompt_ended(request, kept_tokens=prompt_tokens)
            return None
        moves = self._blocks.compress(
            request_id,
            prompt_tokens=prompt_tokens,
            kept_tokens=order.kept_tokens,
            parts_heads=order.parts_heads,
        )
        if moves is None:
            logger.warning("Request %s stays whole: no free block to move it to", request_id)
            self._metrics.prompt_ended(request, kept_tokens=prompt_tokens, no_room=True)
            return None
        freed = sum(len(move.sources) - len(move.targets) for move in moves)
        self._metrics.prompt_ended(request, kept_tokens=order.kept_tokens, blocks_freed=freed)
        return replace(order, moves=moves)


class _CompressingAsyncScheduler(_CompressingScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler."""


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """The compressing counterpart of the scheduler that vLLM would have taken."""
    asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    kind = _CompressingAsyncScheduler if asynchronous else _CompressingScheduler
    return kind(*args, **kwargs)
