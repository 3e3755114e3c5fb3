"""vLLM's second model runner, its default wherever there is Triton."""

from collections.abc import Sequence
from typing import Any

from snapkv_vllm.orders import Move
from snapkv_vllm.runners.compressing import CompressingRunner


class CompressingSecondRunner(CompressingRunner):
    """Its private parts: block tables and requests' rows that live on the device."""

    def _enter_blocks(self: Any, request_id: str, moves: Sequence[Move]) -> None:
        row = self.req_states.req_id_to_index.get(request_id)
        if row is None:
            return
        for move in moves:
            self.block_tables.block_tables[move.group].stage_write(row, 0, list(move.targets))
            self.block_tables.num_blocks.np[move.group, row] = len(move.targets)

    def _step_back(self: Any, request_id: str, tokens: int) -> None:
        """The device counts for itself."""
        row = self.req_states.req_id_to_index.get(request_id)
        if row is not None:
            self.req_states.num_computed_tokens.gpu[row] -= tokens

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """No graph is replayed where queries are put aside, or heads are sequences."""
        state, uniform = super().gather_batch_req_state(  # type: ignore[misc]
            scheduler_output, dummy_run
        )
        return state, None if self._runs_beside_graphs else uniform

    def prepare_attn(self: Any, input_batch: Any) -> Any:
        """Give new tokens of compressed requests the slots behind those they hold."""
        starts = input_batch.query_start_loc_np
        batch = input_batch.req_ids, starts[1 : input_batch.num_reqs + 1].tolist()
        self._enter_batch(*batch)
        block_tables, slots = super().prepare_attn(input_batch)  # type: ignore[misc]
        positions = self._held.positions(input_batch.positions, input_batch.query_start_loc)
        if positions is not None:
            held = self.block_tables.compute_slot_mappings(
                input_batch.idx_mapping,
                input_batch.query_start_loc,
                positions,
                num_tokens_padded=input_batch.num_tokens_after_padding,
                out=self._held_slots(),
            )
            for group in self._compressed_groups:
                slots[group].copy_(held[group])
        self._read_ahead(*batch, (input_batch.input_ids, input_batch.positions))
        return block_tables, slots

    def _held_slots(self: Any) -> Any:
        if not hasattr(self, "_slots_of_held"):
            self._slots_of_held = self.block_tables.slot_mappings.clone()
        return self._slots_of_held
