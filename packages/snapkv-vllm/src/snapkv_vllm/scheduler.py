"""Extends vLLM's schedulers, which then also decide when a request is compressed."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from snapkv_vllm.versions import require_supported_version

require_supported_version()

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from snapkv.errors import SnapKVError, wrong
from snapkv_vllm.admission.compatibility import require_compatible
from snapkv_vllm.admission.methods import require_spans_fit
from snapkv_vllm.admission.names import SESSIONS_METHOD, reason_of
from snapkv_vllm.admission.plans import Order, PromptPlan
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.blocks import CompressedBlocks, cache_only_exact_blocks, find_compressed_managers
from snapkv_vllm.metrics import PromptMetrics
from snapkv_vllm.plugin import end_with_parent
from snapkv_vllm.sessions import SessionStore
from snapkv_vllm.steps import CompressingStep

logger = init_logger("vllm.snapkv")


class _CompressingScheduler(Scheduler):
    """A scheduler of vLLM that also decides when requests are compressed: in the step that computes
    the last token of the prompt.

    The blocks for the kept tokens are allocated when the step is scheduled. If there are none, vLLM
    preempts the youngest request, as it does for the blocks of the step itself. Freed blocks may be
    given to another request at once: it writes to them in a later step, and workers run steps in
    order, even if several are scheduled.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = ServingSettings.from_config(self.vllm_config.additional_config)
        require_compatible(settings=self._settings, engine=self.vllm_config)
        logger.info("Compressing prompts: %s", self._settings.summary)
        self._plans: dict[str, PromptPlan] = {}
        coordinator = self.kv_cache_manager.coordinator
        cache_only_exact_blocks(coordinator, self._plans)
        managers = coordinator.single_type_managers
        compressed = find_compressed_managers(managers)
        self._blocks = CompressedBlocks(compressed, self._plans)
        blocks = self.kv_cache_manager
        self._allocate_slots = blocks.allocate_slots
        blocks.allocate_slots = self._allocate_all
        self._preempts_for_reservation, self._waiting_for_reservation = False, set[str]()
        # The last request without blocks, and whether no request can continue because of it.
        self._blocked_request, self._is_standstill = "", False
        self._metrics = PromptMetrics(self.vllm_config)
        given = compressed, self._settings, self.vllm_config, self.kv_cache_config
        self.sessions = None if self._settings.sessions is None else SessionStore(*given)

    def add_request(self, request: Any) -> None:
        """Accept a request, and plan when it is compressed. If its settings are wrong or its prompt
        does not fit into the cache, no error is raised: it is logged and counted, and vLLM ends the
        request in the next step.
        """
        try:
            self._plans[request.request_id] = self._make_plan(request)
            self._require_blocks(request)
        except SnapKVError as error:  # the web server refuses it before, other front ends may not
            logger.error("Request %s was refused: %s", request.request_id, error)
            self._metrics.record_refusal(reason_of(error))
            # vLLM ends these requests in the next step.
            self.encoder_cache_mismatch_reqs.add(request.request_id)
        super().add_request(request)

    def _make_plan(self, request: Any) -> PromptPlan:
        """Plan when and how a request is compressed. Streaming input, whose prompt is continued
        after its end, and requests without sampling parameters are not compressed.

        Raises:
            SnapKVError: the settings of the request are wrong or conflict with the engine, or its
                spans do not lie inside its prompt.
        """
        params = request.sampling_params
        extra_args = (params and params.extra_args) or {}
        require_compatible(settings=self._settings, extra_args=extra_args, request=request)
        if params is None or request.resumable:
            return PromptPlan(prompt_tokens=request.num_prompt_tokens)
        plan = self._settings.plan_request(extra_args, request.num_prompt_tokens)
        require_spans_fit(plan.policy, request.num_prompt_tokens)
        if plan.shareable_tokens is not None:
            require_compatible(engine=self.vllm_config, request=request)
        return plan if self.sessions is None else self.sessions.plan_request(request, plan)

    def _require_blocks(self, request: Any) -> None:
        """Check that the cache has enough blocks for the prompt of a request, if no other request
        takes any.

        Raises:
            InvalidArgumentError: the prompt needs more blocks than the whole cache has.
        """
        manager, tokens = self.kv_cache_manager, request.num_prompt_tokens
        most = manager.block_pool.num_gpu_blocks - 1  # vLLM never uses one of its blocks
        needed = manager.coordinator.get_num_blocks_to_allocate(
            request.request_id,
            tokens,
            manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=0,
            num_local_computed_tokens=0,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
        )
        if needed > most:
            problem = (
                f"the prompt has {tokens:,} tokens and needs {needed} blocks, but the cache only "
                f"has {most}"
            )
            raise wrong(
                "prompt", problem, "Use a shorter prompt, or increase --kv-cache-memory-bytes"
            )

    def _allocate_all(
        self, request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0, **kwargs: Any
    ) -> Any:
        """Allocate the slots of a step as vLLM does, and also reserve blocks for the kept tokens if
        the step ends with a compression.

        If there are too few free blocks, histories that no request uses are evicted one by one. If
        that does not help, a request that has to wait is counted and logged.

        Args:
            request: vLLM's request.
            num_new_tokens: how many tokens the step computes for it.
            num_new_computed_tokens: how many of its tokens it takes from blocks that exist already.
            kwargs: further arguments of vLLM's `allocate_slots`.

        Returns:
            The result of vLLM's `allocate_slots`, which is None if there are too few free blocks.
        """
        sizes: Any = (request, num_new_tokens, num_new_computed_tokens)
        slots = self._allocate_slots(*sizes, **kwargs)
        while slots is None and self.sessions is not None and self.sessions.evict_least_recent():
            slots = self._allocate_slots(*sizes, **kwargs)
        runs, blocks = request.status == RequestStatus.RUNNING, self._blocks
        lacks = slots is None and (blocks.lack_blocks or (runs and blocks.hold_blocks))
        if slots is not None:
            self._waiting_for_reservation.discard(request.request_id)
            seen = request.num_computed_tokens + num_new_computed_tokens
            others = len(self.running) * len(self.kv_cache_config.kv_cache_groups)
            blocks.reserve(request.request_id, seen, num_new_tokens, others_blocks=others)
        elif runs:  # vLLM preempts a request to free blocks
            self._preempts_for_reservation |= lacks
        else:
            if lacks:
                self._count_wait(request.request_id)
            self._blocked_request = request.request_id
            if self.sessions is not None:
                self.sessions.record_wait(request.request_id)
        return slots

    def _record_preempted(self, request_ids: Iterable[str]) -> None:
        """Record which requests vLLM has preempted since the last step. All of them are counted as
        waiting if blocks for the kept tokens of a request were the reason.
        """
        for request_id in request_ids:
            if self._preempts_for_reservation:
                self._count_wait(request_id)
            if self.sessions is not None:
                self.sessions.record_preemption(request_id)
        self._preempts_for_reservation = False

    def _count_wait(self, request_id: str) -> None:
        """Count a request that waits for blocks for its kept tokens. It is counted only once until
        it gets these blocks, however long it waits.
        """
        if request_id not in self._waiting_for_reservation:
            self._waiting_for_reservation.add(request_id)
            self._metrics.count("waits")

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Free an ended request as vLLM does, after storing its tokens as a history of its session,
        and forget its plan. The result is that of vLLM.
        """
        self._metrics.forget_request(request.request_id)
        self._waiting_for_reservation.discard(request.request_id)
        if self.sessions is not None:
            self.sessions.store_history(request)
        freed = super()._free_request(request, *args, **kwargs)
        if self.sessions is not None:
            self.sessions.report_metrics()
        self._plans.pop(request.request_id, None)
        return freed

    def _get_local_prefix_cache_hit(
        self, request: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, int, int, bool]:
        """Find the blocks with which a request begins. If it belongs to a session, a history is
        chosen and pinned here, and its blocks are returned. Otherwise they are the blocks that vLLM
        finds in the prefix cache, up to the tokens that the request may take from there.

        Returns:
            The blocks and the number of their computed tokens, followed by two values of vLLM.
        """
        if self.sessions is not None:
            if plan := self.sessions.plan_next(request.request_id):
                self._plans[request.request_id] = plan
            if (reused := self.sessions.reused_blocks(request.request_id)) is not None:
                begun, found = reused
                blocks = self.kv_cache_manager.create_kv_cache_blocks(found)
                return blocks, begun.prefix_tokens, 0, False
        found_by_vllm = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        blocks, cached, boundary, diverged = found_by_vllm
        plan = self._plans.get(request.request_id)
        usable = None if plan is None else plan.reusable_tokens
        if usable is not None and self.num_spec_tokens:  # vLLM pads a single last token with drafts
            usable = max(0, min(usable, request.num_tokens - 2))
        if usable is not None and cached > usable:
            manager = self.kv_cache_manager
            found, cached, _ = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, usable
            )
            blocks = manager.create_kv_cache_blocks(found)
        return blocks, cached, boundary, diverged

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how many tokens of a request the next step computes: as many as vLLM decides, but
        not beyond the next compression.

        Args:
            request: vLLM's request.
            num_computed_tokens: tokens that are computed before the step.
            num_new_tokens: how many tokens could be computed.
        """
        computed = num_computed_tokens, num_new_tokens
        tokens: int = super()._reserve_prefill_lookahead(request, *computed)
        if (plan := self._plans.get(request.request_id)) is None:
            return tokens
        held = num_computed_tokens - self._blocks.dropped_tokens(request.request_id)
        return plan.limit_step(num_computed_tokens, held, tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> CompressingStep:
        """Schedule a step as vLLM does, and add the orders for the compressions that follow it.

        For every request that is compressed after the step, this frees the blocks that it no longer
        needs. It also counts and logs requests that wait for blocks.
        """
        output = super().schedule(*args, **kwargs)
        self._record_preempted(output.preempted_req_ids or ())
        self._record_standstill()
        orders = {}
        for request_id, step_tokens in output.num_scheduled_tokens.items():
            order = self._make_order(self.requests[request_id], step_tokens)
            if order is not None:
                orders[request_id] = order
        return CompressingStep.extend(
            output,
            snapkv_orders=orders,
            snapkv_dropped=self._dropped_of_histories(output),
            snapkv_forgotten=() if self.sessions is None else self.sessions.pop_forgotten(),
        )

    def _record_standstill(self) -> None:
        """Log and count that a request waits for blocks and that no running request will free any.
        This is done once, and again only after a step in which a request ran or none waited.
        """
        name, self._blocked_request, before = self._blocked_request, "", self._is_standstill
        self._is_standstill = bool(name) and not self.running
        if self._is_standstill and not before:
            self._metrics.count("standstills")
            logger.error(
                "No request can continue: %s waits for blocks, %s of %s are free, none is running",
                name,
                self.kv_cache_manager.block_pool.get_num_free_blocks(),
                self.kv_cache_config.num_blocks,
            )

    def _dropped_of_histories(self, scheduler_output: Any) -> dict[str, int]:
        """Return how many tokens were dropped by the histories with which new and resumed requests
        begin, by request id. Requests without dropped tokens are left out.
        """
        if self.sessions is None:
            return {}
        names = [one.req_id for one in scheduler_output.scheduled_new_reqs]
        names += scheduler_output.scheduled_cached_reqs.resumed_req_ids
        dropped = ((name, self.sessions.dropped_tokens_of(name)) for name in names)
        return {name: tokens for name, tokens in dropped if tokens}

    def _make_order(self, request: Any, step_tokens: int) -> Order | None:
        """Return the order of a request for the step that was just scheduled, or None if the
        workers only have to run the model for it.

        If the request is compressed after the step, its blocks are freed here. If its prompt ends
        in the step, the prompt is counted in the metrics.

        Args:
            request: vLLM's request, whose computed tokens include those of the step.
            step_tokens: how many tokens the step computes for it.
        """
        request_id, prompt_tokens = request.request_id, request.num_prompt_tokens
        plan = self._plans.get(request_id)
        seen = request.num_computed_tokens - step_tokens
        order = None
        if plan is not None:
            held = seen - self._blocks.dropped_tokens(request_id)
            order = plan.make_order(seen, held, step_tokens)
        if order is not None and order.is_due:
            order = self._compress(request, order)
        if plan is not None and seen < prompt_tokens <= request.num_computed_tokens:
            kept = prompt_tokens - self._blocks.dropped_tokens(request_id)
            if order is not None and order.is_due:
                kept = order.kept_tokens
            self._metrics.record_prompt_end(request, kept_tokens=kept)
        return order

    def _compress(self, request: Any, order: Order) -> Order:
        """Free the blocks that a request no longer needs, and return a copy of its order with the
        moves of the kept tokens. The compression is counted, and recorded for its session.
        """
        moves = self._blocks.compress(request.request_id, order)
        freed = sum(len(move.sources) - len(move.targets) for move in moves)
        self._metrics.record_compression(order, freed)
        order = replace(order, moves=moves)
        if self.sessions is not None:
            self.sessions.record_compression(request.request_id, order)
        return order

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset the prefix cache as vLLM does, and return whether vLLM has reset it. Idle histories
        are removed in any case, because other weights may have computed them.
        """
        if self.sessions is not None:
            self.sessions.remove_idle()
        return bool(super().reset_prefix_cache(*args, **kwargs))


class _CompressingAsyncScheduler(_CompressingScheduler, AsyncScheduler):
    """An asynchronous scheduler of vLLM that also decides when requests are compressed."""


def _call_sessions(engine: EngineCore, method: str, arguments: Sequence[Any]) -> Any:
    """Call a method of the `SessionStore` that belongs to the scheduler of an engine, and return
    its result. The engine must have sessions.
    """
    return getattr(engine.scheduler.sessions, method)(*arguments)


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """Build the scheduler that vLLM would have built, extended by the compression of requests.

    This also adds a method to vLLM's `EngineCore`, through which web servers list and delete
    sessions between two steps, and lets this process be killed when its parent ends.

    Args:
        args: passed on to vLLM's scheduler.
        kwargs: passed on to vLLM's scheduler; `vllm_config` must be among them.

    Raises:
        InvalidArgumentError: the settings in `additional_config` are wrong.
        InvalidTypeError: a value of the settings has the wrong type.
        UnsupportedModelError: the engine cannot serve with the settings, or was not built with the
            worker of this plugin.
    """
    end_with_parent()
    setattr(EngineCore, SESSIONS_METHOD, _call_sessions)
    asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    base = _CompressingAsyncScheduler if asynchronous else _CompressingScheduler
    return base(*args, **kwargs)
