"""vLLM's model runner, for which a request may hold fewer tokens than it has seen."""

from typing import Any, Self

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from snapkv.serving.blocks import CompressedSpec
from snapkv.serving.compressor import Compressor
from snapkv.serving.orders import Order
from snapkv.serving.refusals import require_supported, require_supported_layers
from snapkv.serving.scheduler import ORDERS


class CompressingRunner:
    """Laid over the runner of vLLM that a worker has made.

    Positions stay true. What attention is told of a compressed request, its length and the slots
    of its new tokens, counts the tokens it holds. Those numbers are changed in place, in the
    buffers that CUDA graphs read.
    """

    _orders: dict[str, Order]
    _dropped: dict[str, int]
    _moved: dict[str, list[int]]
    _compressor: Compressor | None

    @classmethod
    def over(cls, runner: Any) -> Self:
        """Give a runner these abilities; only this one, others of its class stay as they are."""
        require_supported(runner.vllm_config)
        kind = type(runner)
        runner.__class__ = type(f"Compressing{kind.__name__}", (cls, kind), {})
        runner._orders, runner._dropped, runner._moved = {}, {}, {}
        runner._compressor = None
        adapted: Self = runner
        return adapted

    def get_kv_cache_spec(self: Any) -> Any:
        """What the layers keep, as blocks that may be compressed."""
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        require_supported_layers(layers, specs)
        return {name: CompressedSpec(**_fields(spec)) for name, spec in specs.items()}

    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, and look up where its keys and values lie."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        (group,) = kv_cache_config.kv_cache_groups
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, group.layer_names)
        if self._compressor is None:
            self._compressor = Compressor(
                layers, block_tokens=group.kv_cache_spec.block_size, device=self.device
            )
        self._compressor.bind_caches()

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for request_id in (*scheduler_output.finished_req_ids, *resumed):
            self._forget(request_id)
        self._move_to_new_blocks()
        self._orders = getattr(scheduler_output, ORDERS, {})
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _forget(self, request_id: str) -> None:
        self._dropped.pop(request_id, None)
        self._moved.pop(request_id, None)
        if self._compressor is not None:
            self._compressor.recorder.forget(request_id)

    def _move_to_new_blocks(self: Any) -> None:
        """Enter the blocks of the requests that the last step compressed."""
        for request_id, blocks in self._moved.items():
            state = self.requests.get(request_id)
            if state is None:
                continue
            state.block_ids = (list(blocks),)
            row = self.input_batch.req_id_to_index.get(request_id)
            if row is not None:
                self.input_batch.block_table.clear_row(row)
                self.input_batch.block_table.add_row((blocks,), row)
        self._moved = {}

    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        self._listen_for_queries()
        self._count_held_tokens(scheduler_output.total_num_scheduled_tokens)
        return prepared

    def _listen_for_queries(self: Any) -> None:
        wanted = {}
        for request_id, order in self._orders.items():
            if order.query_tokens:
                row = self.input_batch.req_id_to_index[request_id]
                end = int(self.query_start_loc.np[row + 1])
                wanted[request_id] = slice(end - order.query_tokens, end)
        self._compressor.recorder.wanted = wanted

    def _count_held_tokens(self: Any, step_tokens: int) -> None:
        """Correct lengths and slots for what compressed requests have dropped."""
        requests = self.input_batch.num_reqs
        dropped = np.zeros(requests, dtype=np.int32)
        for row, request_id in enumerate(self.input_batch.req_ids[:requests]):
            dropped[row] = self._dropped.get(request_id, 0)
        if not dropped.any():
            return
        by_request = torch.from_numpy(dropped)
        self.optimistic_seq_lens_cpu[:requests] -= by_request
        by_request = by_request.to(self.device)
        self.seq_lens[:requests] -= by_request
        of_token = by_request[self.req_indices.gpu[:step_tokens].long()]
        self.input_batch.block_table.compute_slot_mapping(
            requests,
            self.query_start_loc.gpu[: requests + 1],
            self.positions[:step_tokens] - of_token,
        )

    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        if self._orders:
            orders, self._orders = self._orders, {}
            self._compressor.recorder.wanted = {}
            self._carry_out(orders)
        return output

    def _carry_out(self: Any, orders: dict[str, Order]) -> None:
        blocks = {request_id: self.requests[request_id].block_ids[0] for request_id in orders}
        self._compressor.compress(orders, blocks)
        for request_id, order in orders.items():
            if order.compress:
                self._dropped[request_id] = order.dropped_tokens
                self._moved[request_id] = self._blocks_after(order, blocks[request_id])

    def _blocks_after(self: Any, order: Order, blocks: list[int]) -> list[int]:
        if order.target_blocks is not None:
            return list(order.target_blocks)
        return blocks[: -(-order.kept_tokens // self.cache_config.block_size)]


def _fields(spec: Any) -> dict[str, Any]:
    return {
        name: getattr(spec, name) for name, one in spec.__dataclass_fields__.items() if one.init
    }
