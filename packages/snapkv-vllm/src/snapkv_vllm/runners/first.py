"""vLLM's first model runner, which serves where there is no Triton and what the second refuses."""

from collections.abc import Sequence
from typing import Any

from snapkv_vllm.orders import Move
from snapkv_vllm.runners.compressing import CompressingRunner


class CompressingFirstRunner(CompressingRunner):
    """Its private parts: rows and block tables in `input_batch`, block lists in `requests`."""

    def _enter_blocks(self: Any, request_id: str, moves: Sequence[Move]) -> None:
        state = self.requests.get(request_id)
        if state is None:
            return
        blocks = list(state.block_ids)
        for move in moves:
            blocks[move.group] = list(move.targets)
        state.block_ids = tuple(blocks)
        row = self.input_batch.req_id_to_index.get(request_id)
        if row is not None:
            self.input_batch.block_table.clear_row(row)
            self.input_batch.block_table.add_row(state.block_ids, row)

    def _step_back(self, request_id: str, tokens: int) -> None:
        """The scheduler's number counts, with every step."""

    def _prepare_inputs(self: Any, scheduler_output: Any, *args: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, *args)  # type: ignore[misc]
        requests = self.input_batch.num_reqs
        starts = self.query_start_loc
        batch = self.input_batch.req_ids[:requests], starts.np[1 : requests + 1].tolist()
        self._enter_batch(*batch)
        tokens = scheduler_output.total_num_scheduled_tokens
        on_device = starts.gpu[: requests + 1]
        positions = self._held.positions(self.positions[:tokens], on_device)
        if positions is not None:
            for group in self._compressed_groups:
                table = self.input_batch.block_table[group]
                table.compute_slot_mapping(requests, on_device, positions)
        self._read_ahead(*batch, (self.input_ids.gpu, self.positions))
        return prepared

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Let no prompt that is still being read draw from its seed.

        vLLM throws the token away and takes the draw back, by an offset into the generator, which
        generators of CPUs do not have: the engine would end.
        """
        generators = self.input_batch.generators
        reads = self.discard_request_mask.np
        reading = {row: generators.pop(row) for row in list(generators) if reads[row]}
        try:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        finally:
            generators.update(reading)

    def _is_uniform_decode(self, *args: Any, **kwargs: Any) -> bool:
        """No graph is replayed where queries are put aside, or heads are sequences."""
        uniform = super()._is_uniform_decode(*args, **kwargs)  # type: ignore[misc]
        return bool(uniform) and not self._runs_beside_graphs
