"""The inner parts of vLLM that the plugin stands on; these fail first when vLLM changes one."""

import dataclasses
import inspect

import pytest
import torch


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_scheduler_asks_where_a_step_ends_for_every_request():
    from vllm.v1.core.sched.scheduler import Scheduler

    expected = ["self", "request", "num_computed_tokens", "num_new_tokens"]
    assert parameters(Scheduler._reserve_prefill_lookahead) == expected
    calls = inspect.getsource(Scheduler.schedule).count("self._reserve_prefill_lookahead(")
    assert calls == 2  # for running requests and for waiting ones


def test_the_scheduler_looks_up_prefixes_which_can_be_asked_to_end_earlier():
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    assert parameters(Scheduler._get_local_prefix_cache_hit) == ["self", "request"]
    assert "self._get_local_prefix_cache_hit(request)" in inspect.getsource(Scheduler.schedule)
    expected = ["self", "block_hashes", "max_cache_hit_length"]
    assert parameters(KVCacheCoordinator.find_longest_cache_hit)[:3] == expected
    assert parameters(KVCacheManager.create_kv_cache_blocks)[:2] == ["self", "blocks"]


def test_the_scheduler_moves_on_after_a_step_and_frees_requests():
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    assert parameters(Scheduler._update_after_schedule) == ["self", "scheduler_output"]
    source = inspect.getsource(Scheduler.schedule)
    assert source.rstrip().endswith("return scheduler_output")
    assert "self._update_after_schedule(scheduler_output)" in source
    assert issubclass(AsyncScheduler, Scheduler)
    assert "_free_request" in vars(Scheduler)


def test_the_scheduler_preempts_where_a_step_gets_no_blocks():
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    asked = ["self", "request", "num_new_tokens", "num_new_computed_tokens"]
    assert parameters(KVCacheManager.allocate_slots)[:4] == asked
    assert in_order(
        KVCacheManager.allocate_slots,
        "self.coordinator.get_num_blocks_to_allocate(",
        "required_blocks > available_blocks",
        "self.coordinator.allocate_new_blocks(",
    )
    assert inspect.getsource(Scheduler.schedule).count("kv_cache_manager.allocate_slots(") == 2
    assert in_order(
        Scheduler.schedule, "kv_cache_manager.allocate_slots(", "self._preempt_request("
    )
    assert parameters(Scheduler._preempt_request)[:2] == ["self", "request"]
    assert parameters(BlockPool.evict_blocks) == ["self", "block_ids"]


def test_the_scheduler_counts_what_is_computed_apart_from_what_is_under_way():
    """So that less may be computed than a step had tokens."""
    from vllm.v1.core.sched.scheduler import Scheduler

    after = inspect.getsource(Scheduler._update_after_schedule)
    assert "request.num_computed_tokens += num_scheduled_token" in after
    output = inspect.getsource(Scheduler.update_from_output)
    assert "num_computed_tokens +=" not in output
    cached = inspect.getsource(Scheduler._make_cached_request_data)
    assert "num_computed_tokens" in cached  # the workers are told anew in every step


def test_scheduler_worker_and_settings_are_arguments():
    from vllm.engine.arg_utils import EngineArgs

    from snapkv_vllm.server import OWN

    assert {*OWN} <= {field.name for field in dataclasses.fields(EngineArgs)}


def test_scheduler_output_carries_further_attributes_between_processes():
    import pickle

    from vllm.v1.core.sched.output import SchedulerOutput

    assert dataclasses.is_dataclass(SchedulerOutput)
    output = SchedulerOutput.make_empty()
    output.snapkv_orders = {"a": 1}
    assert pickle.loads(pickle.dumps(output)).snapkv_orders == {"a": 1}


def test_blocks_are_counted_by_tokens():
    from vllm.v1.core.single_type_kv_cache_manager import (
        FullAttentionManager,
        SingleTypeKVCacheManager,
    )

    base = SingleTypeKVCacheManager
    assert parameters(base.get_num_blocks_to_allocate)[:8] == [
        "self",
        "request_id",
        "num_tokens",
        "new_computed_blocks",
        "total_computed_tokens",
        "num_local_computed_tokens",
        "num_tokens_main_model",
        "apply_admission_cap",
    ]
    expected = ["self", "request_id", "num_tokens", "num_tokens_main_model"]
    assert parameters(base.allocate_new_blocks) == expected
    assert parameters(FullAttentionManager.cache_blocks)[:3] == ["self", "request", "num_tokens"]
    assert parameters(base.pop_blocks_for_free) == ["self", "request_id"]
    assert "pop_blocks_for_free" in inspect.getsource(base.free)


def test_a_spec_of_ones_own_has_a_manager_of_ones_own():
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from snapkv_vllm.blocks import CompressedManager, CompressedSpec, register_spec

    register_spec()
    register_spec()  # every process may do so again
    spec = CompressedSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    assert KVCacheSpecRegistry.get_manager_class(spec) is CompressedManager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(spec) is FullAttentionSpec
    plain = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    assert KVCacheSpecRegistry.get_manager_class(plain) is not CompressedManager


def runners():
    """The classes that vLLM's own processes make, first and second."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

    return First, Second


def in_order(function, *parts):
    """Whether the parts stand in a function's source, one behind the other."""
    source = inspect.getsource(function)
    places = [source.index(part) for part in parts]
    return places == sorted(places)


def test_both_runners_ask_for_specs_and_make_metadata_builders():
    from vllm.v1.worker.utils import AttentionGroup

    for runner in runners():
        assert parameters(runner.get_kv_cache_spec) == ["self"]
        assert parameters(runner.initialize_kv_cache)[:2] == ["self", "kv_cache_config"]
        source = inspect.getsource(inspect.getmodule(runner))
        assert "self.attn_groups" in source
        assert "self.kv_cache_config = " in source
        assert "self.max_num_reqs = " in source
    group = AttentionGroup(object, [], None, 0)
    assert group.metadata_builders == []
    group.metadata_builders.append("built")
    assert group.get_metadata_builder() == "built"  # what we told is what is asked


def test_a_step_says_which_requests_begin_anew():
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    for runner in runners():
        assert parameters(runner.execute_model)[:2] == ["self", "scheduler_output"]
        source = inspect.getsource(inspect.getmodule(runner))
        assert "scheduler_output.finished_req_ids" in source
    names = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert {"finished_req_ids", "preempted_req_ids", "scheduled_new_reqs"} <= names
    names = {field.name for field in dataclasses.fields(CachedRequestData)}
    assert {"req_ids", "resumed_req_ids", "new_block_ids"} <= names


def test_metadata_is_built_from_lengths_that_can_be_replaced():
    from vllm.v1.attention.backend import AttentionMetadataBuilder
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    expected = ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]
    for kind in (AttentionMetadataBuilder, CPUAttentionMetadataBuilder):
        assert parameters(kind.build) == expected
    for capture in ("build_for_cudagraph_capture", "build_for_drafting"):
        assert "self.build(" in inspect.getsource(getattr(AttentionMetadataBuilder, capture))
    builder = object.__new__(CPUAttentionMetadataBuilder)
    builder.build = "ours"  # set on the object, before the class's own
    assert builder.build == "ours"


def test_lengths_stand_in_four_fields_of_the_metadata():
    """A field with another length would have to be told too."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    names = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    assert {name for name in names if "seq_len" in name or "num_computed" in name} == {
        "seq_lens",
        "seq_lens_cpu_upper_bound",
        "max_seq_len",
        "_num_computed_tokens_cache",
        "dcp_local_seq_lens",  # context parallelism, which is refused
        "dcp_local_seq_lens_cpu_upper_bound",
        "encoder_seq_lens",  # encoder-decoders, which are refused
        "encoder_seq_lens_cpu",
    } | (names & {"_seq_lens_cpu", "_num_computed_tokens_cpu"})
    assert callable(CommonAttentionMetadata.replace)


def test_the_first_runner_prepares_slots_before_it_runs_the_model():
    from vllm.v1.worker.block_table import BlockTable

    first, _ = runners()
    prepare = inspect.getsource(first._prepare_inputs)
    for part in ("self.query_start_loc.np", "self.positions[", "compute_slot_mapping("):
        assert part in prepare
    assert "self.input_ids.gpu[:" in inspect.getsource(first._preprocess)
    expected = ["self", "num_reqs", "query_start_loc", "positions"]
    assert parameters(BlockTable.compute_slot_mapping) == expected
    assert in_order(
        first.execute_model,
        "self._update_states(",
        "self._prepare_inputs(",
        "self._build_attention_metadata(",
        "self._model_forward(",
    )
    metadata = inspect.getsource(first._build_attention_metadata)
    assert "self.seq_lens[:num_reqs_padded]" in metadata


def test_the_first_runner_keeps_block_lists_and_rows():
    from vllm.v1.worker.block_table import MultiGroupBlockTable
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    first, _ = runners()
    assert "block_ids" in {field.name for field in dataclasses.fields(CachedRequestState)}
    assert parameters(MultiGroupBlockTable.add_row) == ["self", "block_ids", "row_idx"]
    assert parameters(MultiGroupBlockTable.clear_row) == ["self", "row_idx"]
    update = inspect.getsource(first._update_states)
    for part in ("self.requests", "req_state.block_ids", "self.input_batch.req_id_to_index"):
        assert part in update


def test_the_first_runner_asks_whether_all_requests_decode():
    first, _ = runners()
    assert "force_uniform_decode" in parameters(first._is_uniform_decode)
    decide = inspect.getsource(first._determine_batch_execution_and_padding)
    assert decide.count("self._is_uniform_decode(") == 1
    assert in_order(
        first.execute_model, "self._prepare_inputs(", "self._determine_batch_execution_and_padding("
    )


def test_the_first_runner_takes_back_what_a_prompt_drew_from_its_seed():
    from vllm.v1.worker.gpu_input_batch import InputBatch

    first, _ = runners()
    assert in_order(first.sample_tokens, "self._sample(", "self._bookkeeping_sync(")
    taken_back = inspect.getsource(first._bookkeeping_sync)
    assert "self.discard_request_mask.np[:num_reqs]" in taken_back
    assert "self.input_batch.generators.get(int(i))" in taken_back
    sampling = inspect.getsource(InputBatch._make_sampling_metadata)
    assert "generators=self.generators" in sampling


def test_the_second_runner_prepares_slots_before_it_runs_the_model():
    from vllm.v1.worker.gpu.block_table import BlockTables

    _, second = runners()
    assert parameters(second.prepare_attn) == ["self", "input_batch"]
    expected = ["self", "idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out"]
    assert parameters(BlockTables.compute_slot_mappings) == expected
    assert "self.slot_mappings = " in inspect.getsource(BlockTables.__init__)
    assert in_order(
        second.execute_model,
        "self.gather_batch_req_state(",
        "self.prepare_inputs(",
        "self.prepare_attn(input_batch)",
        "self.model_state.prepare_attn(",
    )


def test_the_second_runner_counts_on_the_device_what_is_computed():
    _, second = runners()
    count = inspect.getsource(second.postprocess_num_computed_tokens)
    assert "self.req_states.num_computed_tokens.gpu," in count
    inputs = inspect.getsource(second.prepare_inputs)
    assert "self.input_buffers.input_ids" in inputs
    assert "self.input_buffers.positions" in inputs
    assert in_order(second.execute_model, "self.prepare_attn(input_batch)", "input_batch.input_ids")


def test_the_second_runner_stages_writes_of_block_tables():
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.states import RequestState

    append = inspect.getsource(BlockTables.append_block_ids)
    assert "self.block_tables[i].stage_write(req_index, start, block_ids)" in append
    assert "self.num_blocks.np[i, req_index] = end" in append
    assert "self.req_id_to_index" in inspect.getsource(RequestState.__init__)
    _, second = runners()
    assert in_order(
        second.execute_model, "self.update_requests(", "self.block_tables.apply_staged_writes("
    )


def test_the_second_runner_says_whether_all_requests_decode():
    _, second = runners()
    expected = ["self", "scheduler_output", "dummy_run"]
    assert parameters(second.gather_batch_req_state) == expected
    execute = inspect.getsource(second.execute_model)
    assert "batch_req_state, uniform_tok_count = self.gather_batch_req_state(" in execute


def test_attention_calls_its_implementation_with_the_queries_first():
    from vllm.model_executor.layers.attention import Attention, attention

    source = inspect.getsource(attention)
    assert "self.impl.forward(" in source
    assert Attention.get_attn_backend is not None


def test_backends_attend_and_store_for_any_number_of_heads():
    """By what an implementation says of itself, and by fields that all backends' metadata has."""
    from vllm.v1.attention.backend import AttentionMetadataBuilder
    from vllm.v1.attention.backends import cpu_attn, flash_attn, triton_attn

    stored_by = ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]
    for module, name in ((cpu_attn, "CPU"), (flash_attn, "Flash"), (triton_attn, "Triton")):
        prefix = f"{name}Attention"
        kind = getattr(module, f"{prefix}BackendImpl" if name == "CPU" else f"{prefix}Impl")
        assert parameters(kind.do_kv_cache_update) == stored_by
        given = parameters(kind.forward)[1:8]
        assert given == ["layer", "query", *stored_by[2:5], "attn_metadata", "output"]
        made = inspect.getsource(kind.__init__)
        assert "self.num_heads = num_heads" in made
        assert "self.num_kv_heads = num_kv_heads" in made
        found = fields_of(getattr(module, f"{prefix}Metadata"))
        assert {"num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len"} <= found
        assert {"seq_lens", "block_table", "slot_mapping"} <= found
    assert {"scheduler_metadata"} <= fields_of(cpu_attn.CPUAttentionMetadata)
    assert {"scheduler_metadata"} <= fields_of(flash_attn.FlashAttentionMetadata)
    assert {"seq_threshold_3D"} <= fields_of(triton_attn.TritonAttentionMetadata)
    assert "self.layer_names = layer_names" in inspect.getsource(AttentionMetadataBuilder.__init__)


def fields_of(kind):
    return {one.name for one in dataclasses.fields(kind)}


def test_layers_store_by_the_slots_that_builders_see():
    """One tensor of slots for a group, which goes to the metadata and to the layers."""
    from vllm.v1.worker.gpu import attn_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner._get_slot_mappings)
    assert "slot_mappings_by_layer[layer_name] = slot_mapping" in source
    assert "cm.slot_mapping = slot_mappings[kv_cache_gid]" in inspect.getsource(
        GPUModelRunner._build_attention_metadata
    )
    slots = torch.arange(6).view(2, 3)
    group = type("Group", (), {"layer_names": ["a"]})
    config = type("Config", (), {"kv_cache_groups": [group, group]})
    (found,) = attn_utils.build_slot_mappings_by_layer(slots, config).values()
    assert found.data_ptr() == slots[1].data_ptr()
    assert "slot_mapping=slot_mapping" in inspect.getsource(attn_utils.build_attn_metadata)


def test_latent_attention_takes_queries_first_and_keeps_the_matrix_that_turns_them():
    from vllm.model_executor.layers.attention import MLAAttention, mla_attention

    assert parameters(MLAAttention.forward_impl)[:2] == ["self", "q"]
    source = inspect.getsource(mla_attention)
    assert "self.forward_impl(" in source or "layer.forward_impl(" in source
    kept = inspect.getsource(MLAAttention.process_weights_after_loading)
    assert 'replace_parameter(self, "W_UK_T", W_UK.permute(1, 2, 0)' in kept
    made = inspect.getsource(MLAAttention.__init__)
    for part in ("kv_cache", "scale", "qk_nope_head_dim", "kv_lora_rank"):
        assert f"self.{part} =" in made


@pytest.mark.parametrize(
    "module",
    [
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
        "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",
        "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend",
    ],
)
def test_backends_keep_their_names_and_what_the_votes_need(module):
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from snapkv_vllm.refusals import LAYOUTS

    backend = resolve_obj_by_qualname(module)
    assert backend.get_name() in LAYOUTS
    implementation = backend.get_impl_cls()
    assert parameters(implementation.forward)[:4] == ["self", "layer", "query", "key"]
    source = inspect.getsource(implementation.__init__)
    for part in ("self.scale", "self.logits_soft_cap", "self.sinks", "self.alibi_slopes"):
        assert f"{part} =" in source or f"{part}:" in source


@pytest.mark.parametrize("backend", ["flash_attn", "triton_attn"])
def test_gpu_backends_split_a_cache_as_the_plain_layout_does(backend):
    """The expression is theirs; its result is compared with ours."""
    import importlib

    module = importlib.import_module(f"vllm.v1.attention.backends.{backend}")
    source = inspect.getsource(module)
    assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in source

    from snapkv_vllm.layouts import PlainLayout

    cache = torch.randn(5, 2, 16, 2 * 8)  # blocks, heads, tokens, keys and values
    keys, values = cache.transpose(1, 2).split(8, dim=-1)
    layout, blocks = PlainLayout([cache], 8), torch.tensor([3, 0])
    assert torch.equal(layout.read_keys(blocks, 20)[0, 1, :16], keys[3, :, 1])
    read = layout.read_values(blocks, torch.arange(20)[None, None])
    assert torch.equal(read[0, 0, 16:], values[0, :4, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("isa", "block_tokens"), [("vec", 128), ("vec", 32), ("vec16", 16)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_the_cpu_layout_reads_what_the_kernel_wrote(isa, block_tokens, head_size, dtype):
    if isa == "vec" and head_size % 32:
        pytest.skip("vLLM takes vec16 for such heads")
    from snapkv_vllm.layouts import CpuLayout

    cache = torch.zeros(6, 3, block_tokens, 2 * head_size, dtype=dtype)
    layout = CpuLayout([cache], isa)
    tokens = 2 * block_tokens + 5
    keys, values = torch.randn(2, 1, 3, tokens, head_size).to(dtype)
    blocks = torch.tensor([4, 1, 5])
    slots = torch.cat([block * block_tokens + torch.arange(block_tokens) for block in blocks])
    layout.write(slots[:tokens], keys, values)
    assert torch.equal(layout.read_keys(blocks, tokens), keys)
    assert torch.equal(layout.read_values(blocks, torch.arange(tokens)[None, None]), values)
    keep = torch.stack([torch.randperm(tokens)[:40].sort().values for _ in range(3)])[None]
    expected = values.gather(2, keep[..., None].expand(-1, -1, -1, head_size))
    assert torch.equal(layout.read_values(blocks, keep), expected)
    assert not cache[[0, 2, 3]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_the_cpu_layout_knows_packings_by_their_strides(head_size, dtype):
    from snapkv_vllm.layouts import _packings

    assert all(packing.tokens for packing in _packings("vec", 128, head_size, dtype))


def test_a_packing_without_strides_is_read_place_by_place(monkeypatch):
    from snapkv_vllm import layouts as cpu

    places = torch.randperm(16 * 64, generator=torch.Generator().manual_seed(0))
    packing = cpu._Packing.of(places, 16, 64)
    assert packing.tokens is None
    monkeypatch.setattr(cpu, "_packings", lambda *of: (packing, packing))
    keys = torch.randn(2, 3, 16, 64)
    cache = torch.zeros(2, 3, 16, 2 * 64)
    for half in cache.view(2, 3, 32, 64).chunk(2, dim=2):
        half.copy_(keys.flatten(2)[..., places.argsort()].view(keys.shape))
    layout, blocks = cpu.CpuLayout([cache], "vec"), torch.tensor([1, 0])
    expected = torch.cat([keys[1], keys[0]], dim=1)[None]
    assert torch.equal(layout.read_keys(blocks, 20), expected[:, :, :20])
    assert torch.equal(
        layout.read_values(blocks, torch.tensor([[[3, 17]]])), expected[:, :, [3, 17]]
    )


def test_custom_logits_processors_are_found_by_name_and_asked_about_requests():
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
    from vllm.v1.worker.gpu.sample.logits_processor import (
        build_custom_logits_processors_params_validator,
    )

    from snapkv_vllm import ServingSettings
    from snapkv_vllm.requests import name_of_check

    name = name_of_check(ServingSettings(budget=512, parameters={"window_size": 48}))
    validate_logits_processors_parameters([name], SamplingParams())
    wrong = SamplingParams(extra_args={"snapkv_budget": 40})
    with pytest.raises(VLLMValidationError, match="window_size=48"):
        validate_logits_processors_parameters([name], wrong)
    ask = build_custom_logits_processors_params_validator([name])  # of the second runner
    ask(SamplingParams())
    with pytest.raises(VLLMValidationError, match="window_size=48"):
        ask(wrong)


def test_workers_keep_the_logits_processors_of_others():
    from snapkv_vllm import ServingSettings
    from snapkv_vllm.requests import name_of_check, without_checks

    ours = name_of_check(ServingSettings())
    assert without_checks(["theirs:One", ours, dict]) == ["theirs:One", dict]
    assert without_checks([ours]) is without_checks(None) is None


def test_the_scheduler_ends_requests_with_an_error():
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.update_from_output)
    assert "error_req_ids = set(self.grammar_compile_error_reqs)" in source
    assert "self.grammar_compile_error_reqs.clear()" in source


def test_the_plugin_is_found_and_does_nothing_by_itself():
    from importlib.metadata import entry_points

    (entry,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "snapkv"]
    assert entry.load()() is None

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for kind in (Scheduler, GPUModelRunner):
        assert all("snapkv" not in getattr(part, "__module__", "") for part in vars(kind).values())


def test_workers_take_the_runner_that_they_made_themselves():
    """Only that one: others of its class stay as they are."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    from snapkv_vllm.runners import CompressingRunner

    for worker in (CPUWorker, Worker):
        assert "init_device" in vars(worker)
        assert "self.model_runner" in inspect.getsource(inspect.getmodule(worker))

    class Runner:
        max_num_reqs, device = 4, torch.device("cpu")
        vllm_config = None

    one, other = Runner(), Runner()
    with pytest.MonkeyPatch.context() as patch:
        module = "snapkv_vllm.runners"
        patch.setattr(f"{module}.require_supported", lambda config: None)
        patch.setattr(f"{module}.compression_stopwatch", lambda config, device: None)
        assert CompressingRunner.over(one) is one
    assert isinstance(one, CompressingRunner)
    assert isinstance(one, Runner)
    assert type(other) is Runner


def test_ray_takes_no_cpus():
    """Why Ray is only documented: the executor asks for a device that CPUs do not have in vLLM."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor import ray_utils

    assert CpuPlatform.ray_device_key == ""
    assert "does not support ray" in inspect.getsource(ray_utils.initialize_ray_cluster)


def test_workers_measure_their_memory_with_the_runners_profile_run():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    source = inspect.getsource(Worker.determine_available_memory)
    assert "memory_profiling(" in source
    assert source.count("self.model_runner.profile_run(") == 2  # once without measuring
    for runner in (GPUModelRunner, SecondRunner):
        assert parameters(runner.profile_run) == ["self", "randomize_inputs"]


def test_processes_have_the_names_by_which_they_are_known():
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.utils import APIServerProcessManager

    from snapkv_vllm.plugin import PROCESSES

    engine, worker, web = PROCESSES
    name = f'name=f"{engine}_DP{{global_index}}" if is_dp else "{engine}"'
    assert name in inspect.getsource(CoreEngineProcManager)
    assert f'name=f"{worker}{{rank}}"' in inspect.getsource(WorkerProc)
    assert f'name=f"{web}{{i}}"' in inspect.getsource(APIServerProcessManager)


def test_a_worker_knows_whether_it_is_the_first_of_its_engine():
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.distributed.parallel_state import GroupCoordinator

    assert parameters(get_tp_group) == parameters(get_pp_group) == []
    assert isinstance(GroupCoordinator.is_first_rank, property)


def test_a_web_application_is_made_over_an_engine():
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

    assert parameters(make_arg_parser) == ["parser"]
    assert parameters(build_async_engine_client)[:1] == ["args"]
    assert parameters(build_app) == ["args", "supported_tasks", "model_config"]
    assert parameters(init_app_state) == ["engine_client", "state", "args", "supported_tasks"]
