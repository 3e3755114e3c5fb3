"""The inner parts of vLLM that the plugin stands on; these fail first when vLLM changes one."""

import dataclasses
import inspect
import pkgutil
from operator import attrgetter

import pytest
import torch

from snapkv_vllm.plugin import PROCESSES
from snapkv_vllm.server import OWN


def parameters(function):
    return list(inspect.signature(function).parameters)


def part(name):
    """A part of vLLM, such as "v1.core.sched.scheduler.Scheduler:schedule"."""
    owner, _, inner = name.partition(":")
    found = pkgutil.resolve_name(f"vllm.{owner}")
    return attrgetter(inner)(found) if inner else found


SCHEDULER = "v1.core.sched.scheduler.Scheduler"
FIRST = "v1.worker.gpu_model_runner.GPUModelRunner"
SECOND = "v1.worker.gpu.model_runner.GPUModelRunner"
MANAGER = "v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager"
BUILDER = "v1.attention.backend.AttentionMetadataBuilder"
TRITON_BUILDER = "v1.attention.backends.triton_attn.TritonAttentionMetadataBuilder"
FLASH_BUILDER = "v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder"
CPU_BUILDER = "v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder"
SEQUENCES = (
    "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping"
)
CACHE = "v1.core.kv_cache_manager.KVCacheManager"
RENDERER = "renderers.online_renderer.OnlineRenderer"
LATENT = "model_executor.layers.attention.MLAAttention"

PARAMETERS = {
    f"{SCHEDULER}:_reserve_prefill_lookahead": "request num_computed_tokens num_new_tokens",
    f"{SCHEDULER}:_get_local_prefix_cache_hit": "request",
    f"{SCHEDULER}:_update_after_schedule": "scheduler_output",
    f"{SCHEDULER}:_preempt_request": "request",
    f"{SCHEDULER}:_free_request": "request",
    f"{SCHEDULER}:reset_prefix_cache": "reset_running_requests reset_connector",
    "renderers.base.BaseRenderer:get_tokenizer": "",
    f"{CACHE}:allocate_slots": "request num_new_tokens num_new_computed_tokens",
    f"{CACHE}:create_kv_cache_blocks": "blocks",
    "v1.core.kv_cache_coordinator.KVCacheCoordinator:find_longest_cache_hit": (
        "block_hashes max_cache_hit_length"
    ),
    "v1.core.block_pool.BlockPool:evict_blocks": "block_ids",
    f"{MANAGER}:get_num_blocks_to_allocate": (
        "request_id num_tokens new_computed_blocks total_computed_tokens num_local_computed_tokens "
        "num_tokens_main_model apply_admission_cap"
    ),
    f"{MANAGER}:allocate_new_blocks": "request_id num_tokens num_tokens_main_model",
    f"{MANAGER}:pop_blocks_for_free": "request_id",
    "v1.core.single_type_kv_cache_manager.FullAttentionManager:cache_blocks": "request num_tokens",
    f"{BUILDER}:build": "common_prefix_len common_attn_metadata fast_build",
    f"{CPU_BUILDER}:build": "common_prefix_len common_attn_metadata fast_build",
    **{
        f"{runner}:{name}": given
        for runner in (FIRST, SECOND)
        for name, given in {
            "get_kv_cache_spec": "",
            "initialize_kv_cache": "kv_cache_config",
            "execute_model": "scheduler_output",
            "profile_run": "randomize_inputs",
        }.items()
    },
    f"{SECOND}:prepare_attn": "input_batch",
    f"{SECOND}:gather_batch_req_state": "scheduler_output dummy_run",
    "v1.worker.block_table.BlockTable:compute_slot_mapping": "num_reqs query_start_loc positions",
    "v1.worker.block_table.MultiGroupBlockTable:add_row": "block_ids row_idx",
    "v1.worker.block_table.MultiGroupBlockTable:clear_row": "row_idx",
    "v1.worker.gpu.block_table.BlockTables:compute_slot_mappings": (
        "idx_mapping query_start_loc positions num_tokens_padded out"
    ),
    f"{LATENT}:forward_impl": "q",
    "entrypoints.launchers.cli_args.make_arg_parser": "parser",
    "entrypoints.launchers.api_server.entry.build_async_engine_client": "args",
    "entrypoints.launchers.app.build_app": "args supported_tasks model_config",
    "entrypoints.launchers.api_server.app_state.init_app_state": (
        "engine_client state args supported_tasks"
    ),
    # Where requests meet the document that they name.
    f"{RENDERER}:render_completion": "request",
    f"{RENDERER}:render_chat": "request",
    f"{RENDERER}:create_error_response": "message err_type status_code",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_is_called_or_overridden_takes_these_arguments(name):
    expected = [*(["self"] if ":" in name else []), *PARAMETERS[name].split()]
    assert parameters(part(name))[: len(expected)] == expected


OPENAI = "entrypoints.openai"
ENGINE, WORKER, WEB = PROCESSES

IN_ORDER = [
    # The scheduler asks where a step ends, looks prefixes up, preempts, and moves on at the end.
    (
        f"{SCHEDULER}:schedule",
        "self._reserve_prefill_lookahead(",
        "kv_cache_manager.allocate_slots(",
        "self._preempt_request(",
        "self._get_local_prefix_cache_hit(request)",
        "self._reserve_prefill_lookahead(",
        "kv_cache_manager.allocate_slots(",
        "self._update_after_schedule(scheduler_output)",
        "return scheduler_output",
    ),
    (
        f"{CACHE}:allocate_slots",
        "self.coordinator.get_num_blocks_to_allocate(",
        "required_blocks > available_blocks",
        "self.coordinator.allocate_new_blocks(",
    ),
    # Less may be computed than a step had tokens, and requests may end with an error.
    (f"{SCHEDULER}:_update_after_schedule", "request.num_computed_tokens += num_scheduled_token"),
    (f"{SCHEDULER}:_make_cached_request_data", "num_computed_tokens"),
    (
        f"{SCHEDULER}:update_from_output",
        "error_req_ids = set(self.grammar_compile_error_reqs)",
        "self.grammar_compile_error_reqs.clear()",
    ),
    (f"{MANAGER}:free", "pop_blocks_for_free"),
    (f"{BUILDER}:build_for_cudagraph_capture", "self.build("),
    (f"{TRITON_BUILDER}:build_for_cudagraph_capture", "self.build("),
    (f"{TRITON_BUILDER}:build", "seq_lens = common_attn_metadata.seq_lens\n"),
    (f"{FLASH_BUILDER}:build", "seq_lens = common_attn_metadata.seq_lens\n"),
    (f"{BUILDER}:build_for_drafting", "self.build("),
    # The first runner prepares slots before it runs the model, by rows and lists of blocks.
    (f"{FIRST}:_prepare_inputs", "self.query_start_loc.np", "compute_slot_mapping("),
    (f"{FIRST}:_prepare_inputs", "self.positions["),
    (f"{FIRST}:_preprocess", "self.input_ids.gpu[:"),
    (
        f"{FIRST}:execute_model",
        "self._update_states(",
        "self._prepare_inputs(",
        "self._determine_batch_execution_and_padding(",
        "self._build_attention_metadata(",
        "self._model_forward(",
    ),
    (f"{FIRST}:_build_attention_metadata", "self.seq_lens[:num_reqs_padded]"),
    (f"{FIRST}:_update_states", "self.requests"),
    (f"{FIRST}:_update_states", "req_state.block_ids"),
    (f"{FIRST}:_update_states", "self.input_batch.req_id_to_index"),
    (f"{FIRST}:_determine_batch_execution_and_padding", "self._is_uniform_decode("),
    # It takes back what a prompt drew from its seed.
    (f"{FIRST}:sample_tokens", "self._sample(", "self._bookkeeping_sync("),
    (f"{FIRST}:_bookkeeping_sync", "self.discard_request_mask.np[:num_reqs]"),
    (f"{FIRST}:_bookkeeping_sync", "self.input_batch.generators.get(int(i))"),
    (
        "v1.worker.gpu_input_batch.InputBatch:_make_sampling_metadata",
        "generators=self.generators",
    ),
    # The second does so on the device, where it counts what is computed.
    (
        f"{SECOND}:execute_model",
        "self.update_requests(",
        "self.block_tables.apply_staged_writes(",
        "batch_req_state, uniform_tok_count = self.gather_batch_req_state(",
        "self.prepare_inputs(",
        "self.prepare_attn(input_batch)",
        "self.model_state.prepare_attn(",
    ),
    (f"{SECOND}:execute_model", "self.prepare_attn(input_batch)", "input_batch.input_ids"),
    (f"{SECOND}:postprocess_num_computed_tokens", "self.req_states.num_computed_tokens.gpu,"),
    (f"{SECOND}:prepare_inputs", "self.input_buffers.input_ids"),
    (f"{SECOND}:prepare_inputs", "self.input_buffers.positions"),
    ("v1.worker.gpu.block_table.BlockTables:__init__", "self.slot_mappings = "),
    (
        "v1.worker.gpu.block_table.BlockTables:append_block_ids",
        "self.block_tables[i].stage_write(req_index, start, block_ids)",
    ),
    (
        "v1.worker.gpu.block_table.BlockTables:append_block_ids",
        "self.num_blocks.np[i, req_index] = end",
    ),
    ("v1.worker.gpu.states.RequestState:__init__", "self.req_id_to_index"),
    # Layers call what they are made with; workers measure memory by the runner's profile run.
    ("model_executor.layers.attention.attention.Attention:forward", "self.impl"),
    (
        f"{LATENT}:process_weights_after_loading",
        'replace_parameter(self, "W_UK_T", W_UK.permute(1, 2, 0)',
    ),
    *((f"{LATENT}:__init__", f"self.{one} =") for one in ("kv_cache", "scale", "kv_lora_rank")),
    (f"{LATENT}:__init__", "self.qk_nope_head_dim ="),
    (f"{OPENAI}.completion.serving.OpenAIServingCompletion", "self.online_renderer.render_comp"),
    (f"{OPENAI}.chat_completion.serving.OpenAIServingChat", "self.online_renderer.render_chat("),
    # One tensor of slots for a group goes to the metadata and to the layers.
    (f"{FIRST}:_get_slot_mappings", "slot_mappings_by_layer[layer_name] = slot_mapping"),
    (f"{FIRST}:_build_attention_metadata", "cm.slot_mapping = slot_mappings[kv_cache_gid]"),
    ("v1.worker.gpu.attn_utils.build_attn_metadata", "slot_mapping=slot_mapping"),
    (f"{BUILDER}:__init__", "self.layer_names = layer_names"),
    # Processes have the names by which they are known.
    (
        "v1.engine.utils.CoreEngineProcManager",
        f'name=f"{ENGINE}_DP{{global_index}}" if is_dp else "{ENGINE}"',
    ),
    ("v1.executor.multiproc_executor.WorkerProc", f'name=f"{WORKER}{{rank}}"'),
    ("v1.utils.APIServerProcessManager", f'name=f"{WEB}{{i}}"'),
    (
        "v1.worker.gpu_worker.Worker:determine_available_memory",
        "self.model_runner.profile_run(",
        "memory_profiling(",
        "self.model_runner.profile_run(",
    ),
]


@pytest.mark.parametrize(("name", "parts"), [(name, parts) for name, *parts in IN_ORDER])
def test_vllm_does_this_in_this_order(name, parts):
    source, at = inspect.getsource(part(name)), 0
    for one in parts:
        at = source.index(one, at) + len(one)


FIELDS = {
    "v1.core.sched.output.SchedulerOutput": (
        "finished_req_ids preempted_req_ids scheduled_new_reqs scheduled_cached_reqs"
    ),
    "v1.core.sched.output.CachedRequestData": "req_ids resumed_req_ids new_block_ids",
    "v1.worker.gpu_input_batch.CachedRequestState": "block_ids",
    "engine.arg_utils.EngineArgs": " ".join(OWN),
    "v1.attention.backends.cpu_attn.CPUAttentionMetadata": f"{SEQUENCES} scheduler_metadata",
    "v1.attention.backends.flash_attn.FlashAttentionMetadata": f"{SEQUENCES} scheduler_metadata",
    "v1.attention.backends.triton_attn.TritonAttentionMetadata": f"{SEQUENCES} seq_threshold_3D",
}


@pytest.mark.parametrize("kind", FIELDS)
def test_records_have_these_fields(kind):
    assert set(FIELDS[kind].split()) <= fields_of(part(kind))


def fields_of(kind):
    return {one.name for one in dataclasses.fields(kind)}


@pytest.mark.parametrize("runner", [FIRST, SECOND])
def test_runners_and_workers_have_these_parts(runner):
    source = inspect.getsource(inspect.getmodule(part(runner)))
    for one in ("self.attn_groups", "self.kv_cache_config = ", "self.max_num_reqs = "):
        assert one in source
    assert "scheduler_output.finished_req_ids" in source
    counting = inspect.getsource(part(f"{SCHEDULER}:update_from_output"))
    assert "num_computed_tokens +=" not in counting  # what a step has computed counts once
    for worker in ("v1.worker.cpu_worker.CPUWorker", "v1.worker.gpu_worker.Worker"):
        assert "init_device" in vars(part(worker))
        assert "self.model_runner" in inspect.getsource(inspect.getmodule(part(worker)))


def test_scheduler_output_carries_further_attributes_between_processes():
    import pickle

    from vllm.v1.core.sched.output import SchedulerOutput

    assert dataclasses.is_dataclass(SchedulerOutput)
    output = SchedulerOutput.make_empty()
    output.snapkv_orders = {"a": 1}
    assert pickle.loads(pickle.dumps(output)).snapkv_orders == {"a": 1}


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


@pytest.mark.parametrize(
    "name", ["cpu_attn.CPU", "flash_attn.Flash", "triton_attn.Triton"], ids=lambda one: one[:5]
)
def test_backends_attend_and_store_for_any_number_of_heads(name):
    """By what an implementation says of itself, and what the votes need of it."""
    from snapkv_vllm.layouts import LAYOUTS

    backend = part(f"v1.attention.backends.{name}AttentionBackend")
    assert backend.get_name() in LAYOUTS
    kind = backend.get_impl_cls()
    stored_by = ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]
    assert parameters(kind.do_kv_cache_update) == stored_by
    given = parameters(kind.forward)[1:8]
    assert given == ["layer", "query", *stored_by[2:5], "attn_metadata", "output"]
    made = inspect.getsource(kind.__init__)
    assert "self.num_heads = num_heads" in made
    assert "self.num_kv_heads = num_kv_heads" in made
    for one in ("self.scale", "self.logits_soft_cap", "self.sinks", "self.alibi_slopes"):
        assert f"{one} =" in made or f"{one}:" in made


def test_layers_store_by_the_slots_that_builders_see():
    from vllm.v1.worker.gpu import attn_utils

    slots = torch.arange(6).view(2, 3)
    group = type("Group", (), {"layer_names": ["a"]})
    config = type("Config", (), {"kv_cache_groups": [group, group]})
    (found,) = attn_utils.build_slot_mappings_by_layer(slots, config).values()
    assert found.data_ptr() == slots[1].data_ptr()


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


@pytest.mark.parametrize(
    ("isa", "block_tokens", "head_size", "dtype"),
    [  # every pair of them meets; vLLM takes vec16 for heads of 80
        ("vec", 128, 64, torch.float32),
        ("vec", 32, 128, torch.bfloat16),
        ("vec", 128, 128, torch.float16),
        ("vec", 32, 64, torch.float16),
        ("vec16", 16, 80, torch.float32),
        ("vec16", 16, 64, torch.bfloat16),
        ("vec16", 16, 80, torch.float16),
    ],
)
def test_the_cpu_layout_reads_what_the_kernel_wrote(isa, block_tokens, head_size, dtype):
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


def test_the_plugin_is_found_and_does_nothing_by_itself():
    from importlib.metadata import entry_points

    (entry,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "snapkv"]
    assert entry.load()() is None

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for kind in (Scheduler, GPUModelRunner):
        assert all("snapkv" not in getattr(part, "__module__", "") for part in vars(kind).values())


def test_only_the_runner_that_a_worker_has_made_is_changed():
    from snapkv_vllm.runners import CompressingRunner

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
