"""What both of vLLM's model runners need, so that requests may hold fewer tokens than they saw."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch

from snapkv_vllm.blocks import compressed, is_compressed
from snapkv_vllm.compressor import Compressor, QueryRecorder
from snapkv_vllm.heads.attention import HeadsAttention
from snapkv_vllm.held import HeldTokens
from snapkv_vllm.layers import attention_layers
from snapkv_vllm.metrics import compression_stopwatch
from snapkv_vllm.orders import Beginning, Move, Order
from snapkv_vllm.refusals import (
    compressible_layers,
    require_heads_apart,
    require_supported,
    serves_heads_apart,
)
from snapkv_vllm.rehearsal import Largest, rehearsed
from snapkv_vllm.scheduler import BEGINNINGS, ORDERS
from snapkv_vllm.timing import Stopwatch


class CompressingRunner:
    """Laid over a runner of vLLM that a worker has made; a subclass for each kind of runner.

    The runner's own lengths and positions stay true. Attention in the compressed KV cache groups is
    told the tokens that a request holds, and new tokens go to the slots behind those.
    """

    _orders: dict[str, Order]
    _dropped: dict[str, int]
    _compressed: dict[str, Order]
    _recorder: QueryRecorder
    _compressor: Compressor
    _held: HeldTokens
    _heads: HeadsAttention
    _parts_heads: bool
    _stopwatch: Stopwatch
    _compressed_groups: tuple[int, ...]

    @classmethod
    def over(cls, runner: Any) -> Self:
        """Give a runner these abilities; only this one, others of its class stay as they are."""
        require_supported(runner.vllm_config)
        kind = type(runner)
        runner.__class__ = type(f"Compressing{kind.__name__}", (cls, kind), {})
        runner._orders, runner._dropped, runner._compressed = {}, {}, {}
        runner._recorder = QueryRecorder()
        runner._held = HeldTokens(runner.max_num_reqs, runner.device)
        runner._heads, runner._parts_heads = HeadsAttention(), False
        runner._stopwatch = compression_stopwatch(runner.vllm_config, runner.device)
        adapted: Self = runner
        return adapted

    # What the two runners do differently.

    @abstractmethod
    def _enter_blocks(self, request_id: str, moves: Sequence[Move]) -> None:
        """Let a request that was compressed go on with the blocks it was left."""

    @abstractmethod
    def _step_back(self, request_id: str, tokens: int) -> None:
        """Let a request forget that it computed so many tokens."""

    # What they share.

    def get_kv_cache_spec(self: Any) -> Any:
        """What the layers keep, those with full attention as blocks that may be compressed."""
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        chosen = compressible_layers(attention_layers(self.vllm_config), specs)
        return {name: compressed(spec) if name in chosen else spec for name, spec in specs.items()}

    def profile_run(self: Any, *args: Any, **kwargs: Any) -> None:
        """Let vLLM measure a step with the largest votes that the server allows."""
        specs, layers = self.get_kv_cache_spec(), attention_layers(self.vllm_config)
        chosen = [layers[name] for name, spec in specs.items() if is_compressed(spec)]
        largest = Largest.of(self.vllm_config)
        with rehearsed(chosen, largest, dtype=self.dtype, device=self.device):
            super().profile_run(*args, **kwargs)  # type: ignore[misc]

    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, and look up where its keys and values lie."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        groups = {
            number: group
            for number, group in enumerate(self.kv_cache_config.kv_cache_groups)
            if is_compressed(group.kv_cache_spec)
        }
        self._compressed_groups = tuple(groups)
        if not hasattr(self, "_compressor"):
            self._compressor = self._made_compressor(groups)
        for number in groups:
            for attention in self.attn_groups[number]:
                for builder in attention.metadata_builders:
                    self._held.tell(builder)
                    if serves_heads_apart(self.vllm_config):
                        self._heads.tell(builder)
        self._compressor.bind_caches(
            {number: group.kv_cache_spec.block_size for number, group in groups.items()}
        )

    def _made_compressor(self: Any, groups: Mapping[int, Any]) -> Compressor:
        layers = attention_layers(self.vllm_config)
        of_group = {
            number: {name: layers[name] for name in layers if name in group.layer_names}
            for number, group in groups.items()
        }
        if serves_heads_apart(self.vllm_config):
            for name in {name for of in of_group.values() for name in of}:
                require_heads_apart(name, layers[name])
                self._heads.attach(name, layers[name])
        return Compressor(of_group, self._recorder, device=self.device, heads=self._heads)

    @torch.inference_mode()
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step, and carry out the orders that came with it behind the model."""
        self._forget(requests_that_begin_anew(scheduler_output))
        self._begin(getattr(scheduler_output, BEGINNINGS, {}))
        for request_id, order in self._compressed.items():
            if order.steps_back:
                self._step_back(request_id, order.steps_back)
            if order.moves:
                self._enter_blocks(request_id, order.moves)
        self._compressed = {}
        self._orders = getattr(scheduler_output, ORDERS, {})
        self._parts_heads = self._heads.holds_any(scheduler_output.num_scheduled_tokens)
        try:
            output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._recorder.wanted = {}
            self._held.leave()
            self._heads.leave()
        self._carry_out()
        return output

    def _forget(self, requests: Iterable[str]) -> None:
        for request_id in requests:
            self._dropped.pop(request_id, None)
            self._compressed.pop(request_id, None)
            self._compressor.forget(request_id)
            self._heads.forget(request_id)

    def _begin(self, beginnings: Mapping[str, Beginning]) -> None:
        """Note what those requests hold of which this is the first step, and that have documents.

        Args:
            beginnings: of all requests of the step that begin with a document.
        """
        for request_id, begun in beginnings.items():
            if begun.parts_heads:
                self._heads.begin_with(request_id, begun.first_block)
            elif begun.dropped_tokens:
                self._dropped[request_id] = begun.dropped_tokens

    def _enter_batch(self, requests: Sequence[str], query_ends: Sequence[int]) -> None:
        """Note what this step's requests hold, and whose queries to put aside.

        Args:
            requests: of the batch, row by row.
            query_ends: where the tokens of each request end in the batch.
        """
        self._held.enter(requests, self._dropped)
        self._heads.enter(requests, query_ends)
        self._recorder.wanted = {
            request_id: slice(int(end) - self._orders[request_id].query_tokens, int(end))
            for request_id, end in zip(requests, query_ends, strict=True)
            if request_id in self._orders and self._orders[request_id].query_tokens
        }

    def _read_ahead(self, requests: Sequence[str], query_ends: Sequence[int], inputs: Any) -> None:
        """Put the prompt's last tokens where a step reads them ahead; their slots stay.

        Args:
            requests: of the batch, row by row.
            query_ends: where the tokens of each request end in the batch.
            inputs: (ids, positions), each (tokens,), of the batch.
        """
        for request_id, end in zip(requests, query_ends, strict=True):
            order = self._orders.get(request_id)
            if order is not None and order.ahead is not None:
                rows = slice(end - len(order.ahead.token_ids), end)
                for states, numbers in zip(inputs, order.ahead.rows, strict=True):
                    states[rows] = torch.tensor(numbers, dtype=states.dtype).to(states.device)

    def _carry_out(self) -> None:
        orders, self._orders = self._orders, {}
        self._stopwatch.report()
        if not orders:  # as in steps that measure memory, before there is a cache to compress
            return
        self._compressor.note(orders)
        if any(order.ends for order in orders.values()):
            with self._stopwatch.timing():
                self._compressor.compress(orders)
        for request_id, order in orders.items():
            if order.ends and order.parts_heads:  # what those hold, the heads know
                if order.choice.fills_pages:
                    self._heads.keep_document(request_id, order.moves[0].targets[0])
                self._dropped.pop(request_id, None)
            elif order.moves:
                self._dropped[request_id] = order.dropped_tokens
            if order.ends or order.steps_back:
                self._compressed[request_id] = order

    @property
    def _runs_beside_graphs(self) -> bool:
        """Whether a step does more than a graph of it has captured, in attention or behind it."""
        return bool(self._orders) or self._parts_heads


def requests_that_begin_anew(scheduler_output: Any) -> set[str]:
    """Those of which a step says that they have ended, or start from their first token."""
    return {
        *scheduler_output.finished_req_ids,
        *(scheduler_output.preempted_req_ids or ()),
        *scheduler_output.scheduled_cached_reqs.resumed_req_ids,
        *(request.req_id for request in scheduler_output.scheduled_new_reqs),
    }
