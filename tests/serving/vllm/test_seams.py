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


def test_the_scheduler_looks_up_prefixes_and_moves_on_after_a_step():
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    assert parameters(Scheduler._get_local_prefix_cache_hit) == ["self", "request"]
    assert "self._get_local_prefix_cache_hit(request)" in inspect.getsource(Scheduler.schedule)
    assert parameters(Scheduler._update_after_schedule) == ["self", "scheduler_output"]
    source = inspect.getsource(Scheduler.schedule)
    assert source.rstrip().endswith("return scheduler_output")
    assert "self._update_after_schedule(scheduler_output)" in source
    assert issubclass(AsyncScheduler, Scheduler)
    assert "_free_request" in vars(Scheduler)


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
    assert parameters(base.get_num_blocks_to_allocate)[:3] == ["self", "request_id", "num_tokens"]
    expected = ["self", "request_id", "num_tokens", "num_tokens_main_model"]
    assert parameters(base.allocate_new_blocks) == expected
    assert parameters(FullAttentionManager.cache_blocks)[:3] == ["self", "request", "num_tokens"]
    assert parameters(base.pop_blocks_for_free) == ["self", "request_id"]
    assert "pop_blocks_for_free" in inspect.getsource(base.free)


def test_a_spec_of_ones_own_has_a_manager_of_ones_own():
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from snapkv.serving.blocks import CompressedManager, CompressedSpec, register_spec

    register_spec()
    register_spec()  # every process may do so again
    spec = CompressedSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    assert KVCacheSpecRegistry.get_manager_class(spec) is CompressedManager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(spec) is FullAttentionSpec
    plain = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    assert KVCacheSpecRegistry.get_manager_class(plain) is not CompressedManager


def test_the_runner_prepares_lengths_and_slots_and_then_runs_the_model():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    prepare = inspect.getsource(GPUModelRunner._prepare_inputs)
    for part in ("self.seq_lens[:num_reqs]", "self.optimistic_seq_lens_cpu", "self.req_indices"):
        assert part in prepare
    assert "compute_slot_mapping(" in prepare
    execute = inspect.getsource(GPUModelRunner.execute_model)
    order = [
        "self._update_states(",
        "self._prepare_inputs(",
        "self._build_attention_metadata(",
        "self._model_forward(",
    ]
    places = [execute.index(part) for part in order]
    assert places == sorted(places)
    metadata = inspect.getsource(GPUModelRunner._build_attention_metadata)
    assert "self.seq_lens[:num_reqs_padded]" in metadata


def test_attention_calls_its_implementation_with_the_queries_first():
    from vllm.model_executor.layers.attention import Attention, attention

    source = inspect.getsource(attention)
    assert "self.impl.forward(" in source
    assert Attention.get_attn_backend is not None


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

    from snapkv.serving.refusals import LAYOUTS

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

    from snapkv.serving.layouts.plain import PlainLayout

    cache = torch.randn(5, 2, 16, 2 * 8)  # blocks, heads, tokens, keys and values
    keys, values = cache.transpose(1, 2).split(8, dim=-1)
    layout, blocks = PlainLayout(cache, 8), torch.tensor([3, 0])
    assert torch.equal(layout.read_keys(blocks, 20)[0, 1, :16], keys[3, :, 1])
    read = layout.read_values(blocks, torch.arange(20)[None, None])
    assert torch.equal(read[0, 0, 16:], values[0, :4, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("isa", "block_tokens"), [("vec", 128), ("vec", 32), ("vec16", 16)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_the_cpu_layout_reads_what_the_kernel_wrote(isa, block_tokens, head_size, dtype):
    if isa == "vec" and head_size % 32:
        pytest.skip("vLLM takes vec16 for such heads")
    from snapkv.serving.layouts.cpu import CpuLayout

    cache = torch.zeros(6, 3, block_tokens, 2 * head_size, dtype=dtype)
    layout = CpuLayout(cache, isa)
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
    from snapkv.serving.layouts.cpu import _packings

    assert all(packing.strides for packing in _packings("vec", 128, head_size, dtype))


def test_a_packing_without_strides_is_read_place_by_place(monkeypatch):
    from snapkv.serving.layouts import cpu

    places = torch.randperm(16 * 64, generator=torch.Generator().manual_seed(0))
    packing = cpu._Packing.of(places, 16, 64)
    assert packing.strides is None
    monkeypatch.setattr(cpu, "_packings", lambda *of: (packing, packing))
    keys = torch.randn(2, 3, 16, 64)
    cache = torch.zeros(2, 3, 16, 2 * 64)
    for half in cache.view(2, 3, 32, 64).chunk(2, dim=2):
        half.copy_(keys.flatten(2)[..., places.argsort()].view(keys.shape))
    layout, blocks = cpu.CpuLayout(cache, "vec"), torch.tensor([1, 0])
    expected = torch.cat([keys[1], keys[0]], dim=1)[None]
    assert torch.equal(layout.read_keys(blocks, 20), expected[:, :, :20])
    assert torch.equal(
        layout.read_values(blocks, torch.tensor([[[3, 17]]])), expected[:, :, [3, 17]]
    )


def test_custom_logits_processors_are_found_by_name_and_asked_about_requests():
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

    from snapkv.serving import ServingSettings
    from snapkv.serving.requests import name_of_check

    name = name_of_check(ServingSettings(budget=512, parameters={"window_size": 48}))
    validate_logits_processors_parameters([name], SamplingParams())
    wrong = SamplingParams(extra_args={"snapkv_budget": 40})
    with pytest.raises(VLLMValidationError, match="window_size=48"):
        validate_logits_processors_parameters([name], wrong)


def test_the_plugin_is_found_and_does_nothing_by_itself():
    from importlib.metadata import entry_points

    (entry,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "snapkv"]
    assert entry.load()() is None

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for kind in (Scheduler, GPUModelRunner):
        assert all("snapkv" not in getattr(part, "__module__", "") for part in vars(kind).values())


def test_workers_take_the_runner_that_they_made_themselves():
    from snapkv.serving.runner import CompressingRunner

    class Runner:
        def __init__(self):
            self.vllm_config = None

    one, other = Runner(), Runner()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("snapkv.serving.runner.require_supported", lambda config: None)
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
