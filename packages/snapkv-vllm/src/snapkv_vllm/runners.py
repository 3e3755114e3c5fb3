"""Extends vLLM's model runners to requests that store fewer tokens than they have computed."""

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch

from snapkv.policies import AcrossLayers
from snapkv_vllm.admission.compatibility import require_compatible
from snapkv_vllm.admission.plans import Move, Order
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.blocks import compress_spec, is_compressed
from snapkv_vllm.compressor import Compressor, QueryRecorder
from snapkv_vllm.heads import HeadsAttention
from snapkv_vllm.kept_lengths import KeptLengths
from snapkv_vllm.layers import attention_layers
from snapkv_vllm.memory_profile import LargestStep, hold_largest_queries
from snapkv_vllm.metrics import Stopwatch, compression_stopwatch
from snapkv_vllm.refusals import compressible_layers, require_splittable_heads
from snapkv_vllm.steps import CompressingStep


class CompressingRunner:
    """The methods that this plugin adds to a runner of vLLM. There is one subclass for each of
    vLLM's two runners.

    The lengths and positions of the runner stay true. Only attention in the compressed KV cache
    groups gets the numbers of stored tokens, and new tokens go to the slots after them.
    """

    _orders: Mapping[str, Order]
    _dropped: dict[str, int]
    _compressed: dict[str, Order]
    _recorder: QueryRecorder
    _compressor: Compressor
    _lengths: KeptLengths
    _heads: HeadsAttention
    _has_split_heads: bool  # whether this step has requests whose heads differ
    _splits_heads: bool
    _stopwatch: Stopwatch
    _compressed_groups: tuple[int, ...]

    @classmethod
    def extend(cls, runner: Any) -> Self:
        """Add the methods of this class to an existing runner by changing the class of the runner,
        and return the runner. It gets a new class, so other runners do not change.

        Raises:
            UnsupportedModelError: the engine cannot serve with the settings of the server.
            InvalidArgumentError: the settings in `additional_config` have an unknown name or a
                value that is out of range.
            InvalidTypeError: a value of the settings has the wrong type.
        """
        config = runner.vllm_config
        settings = ServingSettings.from_config(config.additional_config)
        require_compatible(settings=settings, engine=config)
        base = type(runner)
        runner.__class__ = type(f"Compressing{base.__name__}", (cls, base), {})
        runner._orders, runner._dropped, runner._compressed = {}, {}, {}
        runner._recorder = QueryRecorder()
        runner._lengths = KeptLengths(runner.max_num_reqs, runner.device)
        across = settings.policy == AcrossLayers.name
        runner._heads, runner._has_split_heads = HeadsAttention(across_layers=across), False
        runner._splits_heads = settings.per_head_budget
        runner._stopwatch = compression_stopwatch(config, runner.device)
        adapted: Self = runner
        return adapted

    # Methods that differ between the two runners.

    @abstractmethod
    def _set_blocks(self, request_id: str, moves: Sequence[Move]) -> None:
        """Replace the blocks of a compressed request by the targets of its moves. A request that
        the runner no longer has is ignored.
        """

    # Methods that both runners share.

    def get_kv_cache_spec(self: Any) -> Any:
        """Return the specs of all layers, by name. The specs of layers that can be compressed are
        replaced by specs of this plugin.

        Raises:
            UnsupportedModelError: the layers of the model cannot be compressed.
        """
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        chosen = compressible_layers(attention_layers(self.vllm_config), specs)
        return specs | {name: compress_spec(specs[name]) for name in chosen}

    def profile_run(self: Any, *args: Any, **kwargs: Any) -> None:
        """Let vLLM measure the memory of its largest step together with the memory of the largest
        compression, which is allocated and computed here.

        Raises:
            UnsupportedModelError: the layers of the model cannot be compressed.
        """
        specs, layers = self.get_kv_cache_spec(), attention_layers(self.vllm_config)
        chosen = [layers[name] for name, spec in specs.items() if is_compressed(spec)]
        largest = LargestStep.from_config(self.vllm_config)
        with hold_largest_queries(chosen, largest, dtype=self.dtype, device=self.device):
            super().profile_run(*args, **kwargs)  # type: ignore[misc]

    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache as vLLM does, and look up how its keys and values lie in memory.

        vLLM's attention metadata builders are patched, so that they get the numbers of stored
        tokens. The first call also patches the attention layers.

        Raises:
            UnsupportedModelError: the layers or their caches cannot be compressed.
        """
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        groups = {
            number: group
            for number, group in enumerate(self.kv_cache_config.kv_cache_groups)
            if is_compressed(group.kv_cache_spec)
        }
        self._compressed_groups = tuple(groups)
        if not hasattr(self, "_compressor"):
            self._compressor = self._make_compressor(groups)
        for number in groups:
            for attention in self.attn_groups[number]:
                for builder in attention.metadata_builders:
                    self._lengths.patch_builder(builder)
                    if self._splits_heads:
                        self._heads.patch_builder(builder)
        self._compressor.bind_caches(
            {number: group.kv_cache_spec.block_size for number, group in groups.items()}
        )

    def _make_compressor(self: Any, groups: Mapping[int, Any]) -> Compressor:
        """Build the compressor for the compressed KV cache groups. If heads may keep different
        numbers of tokens, the attention layers are patched as well.

        Raises:
            UnsupportedModelError: a layer has attention sinks, and heads may keep different numbers
                of tokens.
        """
        layers = attention_layers(self.vllm_config)
        of_group = {
            number: {name: layers[name] for name in layers if name in group.layer_names}
            for number, group in groups.items()
        }
        if self._splits_heads:
            for name, layer in itertools.chain(*(of.items() for of in of_group.values())):
                require_splittable_heads(name, layer)
                self._heads.patch_layer(name, layer)
        return Compressor(of_group, self._recorder, device=self.device, heads=self._heads)

    @torch.inference_mode()
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the model, and then carry out the orders that the scheduler has sent with
        this step. The result is that of vLLM.

        Requests that were compressed in the last step get their new blocks first.

        Raises:
            RuntimeError: another number of queries was recorded, or another number of tokens is
                kept, than the scheduler has counted.
        """
        self._forget(find_restarted_requests(scheduler_output))
        # vLLM sends a plain step when it measures memory or time.
        if not isinstance(scheduler_output, CompressingStep):
            scheduler_output = CompressingStep.extend(scheduler_output)
        self._dropped.update(scheduler_output.snapkv_dropped)
        if scheduler_output.snapkv_forgotten:
            self._compressor.positions.forget(scheduler_output.snapkv_forgotten)
        for request_id, order in self._compressed.items():
            self._set_blocks(request_id, order.moves)
        self._compressed = {}
        self._orders = scheduler_output.snapkv_orders
        self._has_split_heads = self._heads.holds_any(scheduler_output.num_scheduled_tokens)
        try:
            output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._recorder.rows_of_requests = {}
            self._lengths.end_step()
            self._heads.end_step()
        self._run_orders()
        return output

    def _forget(self, requests: Iterable[str]) -> None:
        """Forget everything that is stored for some requests, except the positions of histories."""
        for request_id in requests:
            self._dropped.pop(request_id, None)
            self._compressed.pop(request_id, None)
            self._compressor.forget(request_id)
            self._heads.forget(request_id)

    def _begin_batch(self, requests: Sequence[str], query_ends: Sequence[int]) -> None:
        """Set how many tokens each request of the batch stores, and which rows of the batch have
        queries that are recorded.

        Args:
            requests: the ids of the requests, in the order of the batch.
            query_ends: where the tokens of each request end in the batch.
        """
        self._lengths.begin_step(requests, self._dropped)
        self._heads.begin_step(requests, query_ends)
        self._recorder.rows_of_requests = {
            request_id: slice(int(end) - self._orders[request_id].query_tokens, int(end))
            for request_id, end in zip(requests, query_ends, strict=True)
            if request_id in self._orders and self._orders[request_id].query_tokens
        }

    def _run_orders(self) -> None:
        """Carry out the orders of the step that has just run, and report the times of earlier
        compressions. It is recorded for the next step which requests were compressed, and how many
        tokens they have dropped.

        Raises:
            RuntimeError: another number of queries was recorded, or another number of tokens is
                kept, than the scheduler has counted.
        """
        orders, self._orders = self._orders, {}
        self._stopwatch.report()
        if not orders:  # for example before the cache is allocated
            return
        if any(order.is_due for order in orders.values()):
            with self._stopwatch.timing():
                self._compressor.compress(orders)
        for request_id, order in orders.items():
            if not order.is_due:
                continue
            if order.per_head_budget:  # `HeadsAttention` knows the counts of each head
                self._dropped.pop(request_id, None)
            else:
                self._dropped[request_id] = order.dropped_tokens
            self._compressed[request_id] = order

    @property
    def _needs_eager_step(self) -> bool:
        """Whether a CUDA graph must not be replayed, because the step does more than the graph has
        captured.
        """
        return bool(self._orders) or self._has_split_heads


def find_restarted_requests(scheduler_output: Any) -> set[str]:
    """Return the ids of the requests whose state must be forgotten: they have ended, were
    preempted, or start from their first token in this step.
    """
    return {
        *scheduler_output.finished_req_ids,
        *(scheduler_output.preempted_req_ids or ()),
        *scheduler_output.scheduled_cached_reqs.resumed_req_ids,
        *(request.req_id for request in scheduler_output.scheduled_new_reqs),
    }


class CompressingFirstRunner(CompressingRunner):
    """Extends the first of vLLM's two runners, which is used on machines without Triton and is
    deprecated in vLLM.

    It uses private parts of that runner: rows and block tables in `input_batch`, block lists in
    `requests`.
    """

    def _set_blocks(self: Any, request_id: str, moves: Sequence[Move]) -> None:
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

    def _prepare_inputs(self: Any, scheduler_output: Any, *args: Any) -> Any:
        """Prepare the inputs of a step as vLLM does, and map the new tokens of compressed requests
        to the slots that follow their stored tokens. The slots are changed in vLLM's block tables.
        """
        prepared = super()._prepare_inputs(scheduler_output, *args)  # type: ignore[misc]
        requests = self.input_batch.num_reqs
        starts = self.query_start_loc
        self._begin_batch(self.input_batch.req_ids[:requests], starts.np[1 : requests + 1].tolist())
        tokens = scheduler_output.total_num_scheduled_tokens
        on_device = starts.gpu[: requests + 1]
        positions = self._lengths.stored_positions(self.positions[:tokens], on_device)
        if positions is not None:
            for group in self._compressed_groups:
                table = self.input_batch.block_table[group]
                table.compute_slot_mapping(requests, on_device, positions)
        return prepared

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample the next tokens as vLLM does, but without the random generators of the prompts
        that are still being read. The generators are put back afterwards.

        vLLM discards such a sample and rewinds the generator by an offset. Generators on CPUs have
        no offset, and the engine would end with an error.
        """
        generators = self.input_batch.generators
        reads = self.discard_request_mask.np
        reading = {row: generators.pop(row) for row in list(generators) if reads[row]}
        try:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        finally:
            generators.update(reading)

    def _is_uniform_decode(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a CUDA graph for decode steps may be replayed. The result is False if the step
        needs more than such a graph has captured.
        """
        uniform = super()._is_uniform_decode(*args, **kwargs)  # type: ignore[misc]
        return bool(uniform) and not self._needs_eager_step


class CompressingSecondRunner(CompressingRunner):
    """Extends the second of vLLM's two runners, which is the default on all machines that have
    Triton.

    It uses private parts of that runner: block tables and rows of requests, which are on the
    device.
    """

    def _set_blocks(self: Any, request_id: str, moves: Sequence[Move]) -> None:
        row = self.req_states.req_id_to_index.get(request_id)
        if row is None:
            return
        for move in moves:
            self.block_tables.block_tables[move.group].stage_write(row, 0, list(move.targets))
            self.block_tables.num_blocks.np[move.group, row] = len(move.targets)

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """Return the state of the batch, and the number of tokens per request if all requests have
        the same number. The number is None if the step needs more than a CUDA graph has captured,
        so that no graph is replayed.
        """
        state, uniform = super().gather_batch_req_state(  # type: ignore[misc]
            scheduler_output, dummy_run
        )
        return state, None if self._needs_eager_step else uniform

    def prepare_attn(self: Any, input_batch: Any) -> Any:
        """Prepare the attention of a batch as vLLM does, and map the new tokens of compressed
        requests to the slots that follow their stored tokens.

        Returns:
            The block tables and the slots of vLLM, of which the slots in compressed KV cache groups
            are changed in place.
        """
        starts = input_batch.query_start_loc_np
        self._begin_batch(input_batch.req_ids, starts[1 : input_batch.num_reqs + 1].tolist())
        block_tables, slots = super().prepare_attn(input_batch)  # type: ignore[misc]
        query_starts = input_batch.query_start_loc
        positions = self._lengths.stored_positions(input_batch.positions, query_starts)
        if positions is not None:
            held = self.block_tables.compute_slot_mappings(
                input_batch.idx_mapping,
                query_starts,
                positions,
                num_tokens_padded=input_batch.num_tokens_after_padding,
                out=self._slot_buffer(),
            )
            for group in self._compressed_groups:
                slots[group].copy_(held[group])
        return block_tables, slots

    def _slot_buffer(self: Any) -> Any:
        """Return a buffer for slots with the shape of vLLM's own. It is allocated by the first
        call.
        """
        if not hasattr(self, "_slots_of_held_tokens"):
            self._slots_of_held_tokens = self.block_tables.slot_mappings.clone()
        return self._slots_of_held_tokens


def extend_runner(runner: Any) -> None:
    """Add the methods of this plugin to the runner that a worker has built, which is changed in
    place.

    The kind is found by its methods, because a release of vLLM may have only one of the two.

    Raises:
        UnsupportedModelError: the engine cannot serve with the settings of the server.
        InvalidArgumentError: the settings in `additional_config` have an unknown name or a value
            that is out of range.
        InvalidTypeError: a value of the settings has the wrong type.
    """
    is_second = hasattr(runner, "prepare_attn")
    (CompressingSecondRunner if is_second else CompressingFirstRunner).extend(runner)
