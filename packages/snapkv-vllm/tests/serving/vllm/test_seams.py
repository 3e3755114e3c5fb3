"""The private parts of vLLM that the plugin uses; these tests fail first if vLLM changes one."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from snapkv_vllm.layouts import LAYOUTS
from snapkv_vllm.plugin import PROCESS_NAME_PREFIXES
from snapkv_vllm.server import PLUGIN_OPTIONS


def part(name):
    return pkgutil.resolve_name(f"vllm.{name}")


OURS = ("blocks", "requests", "runners", "scheduler", "worker")
LAID_OVER = {
    "CompressingFirstRunner": "v1.worker.gpu_model_runner.GPUModelRunner",
    "CompressingSecondRunner": "v1.worker.gpu.model_runner.GPUModelRunner",
    "RequestCheck": "v1.sample.logits_processor.LogitsProcessor",
}
HEADS = ("cpu_attn.CPUAttentionBackendImpl", "flash_attn.FlashAttentionImpl")
ATTENDS = "layer query key value kv_cache attn_metadata output"
PATCHED = {
    "v1.core.kv_cache_manager.KVCacheManager.allocate_slots": (
        "request num_new_tokens num_new_computed_tokens"
    ),
    "v1.core.kv_cache_coordinator.KVCacheCoordinator.cache_blocks": "request num_computed_tokens",
    "v1.attention.backend.AttentionMetadataBuilder.build": (
        "common_prefix_len common_attn_metadata"
    ),
    "model_executor.layers.attention.MLAAttention.forward_impl": "q",
    "renderers.online_renderer.OnlineRenderer.render_chat": "request",
    "renderers.online_renderer.OnlineRenderer.render_completion": "request",
    "renderers.online_renderer.OnlineRenderer.render_responses": "request",
    **{f"v1.attention.backends.{name}.forward": ATTENDS for name in HEADS},
}


def named(method):
    """The names of what a method takes by place, and whether it takes whatever else comes."""
    taken = list(inspect.signature(getattr(method, "__func__", method)).parameters.values())
    by_name = [one.name for one in taken if one.kind == one.POSITIONAL_OR_KEYWORD]
    return [one for one in by_name if one not in ("self", "cls")], len(by_name) < len(taken)


def replaced(module):
    """Our methods in place of vLLM's, or that go on with vLLM's by `super`, and vLLM's."""
    kinds = (kind for kind in vars(module).values() if inspect.isclass(kind))
    for kind in (one for one in kinds if one.__module__ == module.__name__):
        lineage = kind.__mro__
        if over := LAID_OVER.get(kind.__name__):
            lineage += part(over).__mro__
        theirs = [vars(one) for one in lineage if one.__module__.startswith("vllm.")]
        ours = [vars(one) for one in lineage if one.__module__.startswith("snapkv_vllm.")]
        for name, own in (pair for one in ours for pair in one.items()):
            found = next((one[name] for one in theirs if name in one), None)
            if theirs and inspect.isroutine(own) and not name.startswith("__"):
                goes_on = f"super().{name}(" in inspect.getsource(own)
                if goes_on or inspect.isroutine(found):
                    yield name, own, found


@pytest.mark.parametrize("module", OURS)
def test_overriding_methods_accept_the_arguments_of_vllms_methods(module):
    pairs = list(replaced(importlib.import_module(f"snapkv_vllm.{module}")))
    assert pairs
    for name, own, found in pairs:
        assert found is not None, f"vLLM has no {name} any more"
        (taken, takes_more), (wanted, _) = named(own), named(found)
        assert taken == wanted[: len(taken)], name
        assert takes_more or len(taken) == len(wanted), name


@pytest.mark.parametrize(("name", "begins"), PATCHED.items())
def test_patched_methods_of_vllm_have_the_expected_arguments(name, begins):
    wanted = begins.split()
    assert named(part(name))[0][: len(wanted)] == wanted


def test_computed_tokens_of_a_step_are_counted_once():
    counting = inspect.getsource(part("v1.core.sched.scheduler.Scheduler").update_from_output)
    assert "num_computed_tokens +=" not in counting


def test_options_of_the_plugin_exist_in_vllm():
    fields = {one.name for one in dataclasses.fields(part("engine.arg_utils.EngineArgs"))}
    assert set(PLUGIN_OPTIONS) <= fields


def test_processes_of_vllm_have_the_expected_names():
    owners = (
        "v1.engine.utils.CoreEngineProcManager",
        "v1.executor.multiproc_executor.WorkerProc",
        "v1.utils.APIServerProcessManager",
    )
    for name, owner in zip(PROCESS_NAME_PREFIXES, owners, strict=True):
        assert name in inspect.getsource(part(owner))


def test_compressing_step_has_all_fields_of_vllms_step_and_can_be_pickled():
    import pickle

    from vllm.v1.core.sched.output import SchedulerOutput

    from snapkv_vllm.steps import CompressingStep

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens["a"] = 3
    step = CompressingStep.extend(output, snapkv_orders={"a": 1})
    assert step.num_scheduled_tokens is output.num_scheduled_tokens
    travelled = pickle.loads(pickle.dumps(step))
    assert travelled == step
    assert (travelled.snapkv_orders, travelled.snapkv_forgotten) == ({"a": 1}, ())
    assert not any(one.name.startswith("snapkv") for one in dataclasses.fields(SchedulerOutput))


def test_step_of_vllm_lists_preempted_requests():
    scheduler = part("v1.core.sched.scheduler.Scheduler")
    assert "reset_preempted_req_ids.add(" in inspect.getsource(scheduler._preempt_request)
    assert "preempted_req_ids=self.reset_preempted_req_ids" in inspect.getsource(scheduler.schedule)


def test_registered_spec_gets_its_own_manager():
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


def test_metadata_has_lengths_in_the_expected_fields():
    """Another field with lengths would have to be reduced, too."""
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
def test_supported_backends_have_a_layout(name):
    assert part(f"v1.attention.backends.{name}AttentionBackend").get_name() in LAYOUTS


def test_layers_store_by_the_slots_of_their_builder():
    from vllm.v1.worker.gpu import attn_utils

    slots = torch.arange(6).view(2, 3)
    group = type("Group", (), {"layer_names": ["a"]})
    config = type("Config", (), {"kv_cache_groups": [group, group]})
    (found,) = attn_utils.build_slot_mappings_by_layer(slots, config).values()
    assert found.data_ptr() == slots[1].data_ptr()


@pytest.mark.parametrize("backend", ["flash_attn", "triton_attn"])
def test_plain_layout_splits_a_cache_as_gpu_backends_do(backend):
    """vLLM's own expression is evaluated and compared with our layout."""
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
def test_cpu_layout_reads_the_states_that_the_kernel_wrote(isa, block_tokens, head_size, dtype):
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
def test_cpu_layout_describes_packings_by_strides(head_size, dtype):
    from snapkv_vllm.layouts import NumberFormat, _measure_packings

    packings = _measure_packings("vec", 128, head_size, NumberFormat(dtype))
    assert all(packing.tokens for packing in packings)


def test_packing_without_strides_is_read_by_indices(monkeypatch):
    from snapkv_vllm import layouts as cpu

    places = torch.randperm(16 * 64, generator=torch.Generator().manual_seed(0))
    packing = cpu._Packing.build(places, 16, 64)
    assert packing.tokens is None
    monkeypatch.setattr(cpu, "_measure_packings", lambda *of: (packing, packing))
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


def test_vllm_finds_the_settings_check_by_name_and_calls_it():
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
    from vllm.v1.worker.gpu.sample.logits_processor import (
        build_custom_logits_processors_params_validator,
    )

    from snapkv_vllm import ServingSettings
    from snapkv_vllm.requests import check_name

    name = check_name(ServingSettings(budget=512, parameters={"window_size": 48}))
    validate_logits_processors_parameters([name], SamplingParams())
    wrong = SamplingParams(extra_args={"snapkv_budget": 40})
    with pytest.raises(VLLMValidationError, match="window_size=48"):
        validate_logits_processors_parameters([name], wrong)
    ask = build_custom_logits_processors_params_validator([name])  # of the second runner
    ask(SamplingParams())
    with pytest.raises(VLLMValidationError, match="window_size=48"):
        ask(wrong)


def test_workers_keep_other_logits_processors():
    from snapkv_vllm import ServingSettings
    from snapkv_vllm.requests import check_name, remove_checks

    ours = check_name(ServingSettings())
    assert remove_checks(["theirs:One", ours, dict]) == ["theirs:One", dict]
    assert remove_checks([ours]) is remove_checks(None) is None


def test_plugin_is_found_and_changes_nothing_by_itself():
    from importlib.metadata import entry_points

    (entry,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "snapkv"]
    assert entry.load()() is None

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for kind in (Scheduler, GPUModelRunner):
        assert all("snapkv" not in getattr(part, "__module__", "") for part in vars(kind).values())


OF_FIRST = (
    "v1.sample.logits_processor",
    "v1.worker.gpu_model_runner",
    "v1.worker.cpu_model_runner",
)
OF_SECOND = ("v1.worker.gpu",)


def everything():
    """Our package, with all of its modules imported."""
    package = importlib.import_module("snapkv_vllm")
    for module in pkgutil.walk_packages(package.__path__, "snapkv_vllm."):
        importlib.import_module(module.name)
    return package


@pytest.mark.parametrize(
    ("absent", "there"),
    [(OF_FIRST, "v1.worker.gpu.sample"), (OF_SECOND, "v1.sample")],
    ids=["without-the-first-runner", "without-the-second-runner"],
)
def test_plugin_works_if_one_of_vllms_runners_is_missing(monkeypatch, absent, there):
    """Every module of ours is imported again, and a request's settings are checked."""
    kind = part(f"{there}.logits_processor.LogitsProcessor")
    everything()  # vLLM's own worker imports both of its runners
    gone = tuple(f"vllm.{name}" for name in absent)
    for name in list(sys.modules):
        if name.startswith(gone):
            monkeypatch.setitem(sys.modules, name, None)
        elif name.partition(".")[0] == "snapkv_vllm":
            monkeypatch.delitem(sys.modules, name)
    ours = everything()
    name = ours.requests.check_name(ours.ServingSettings(budget=64))
    check = pkgutil.resolve_name(name)
    assert issubclass(check, kind)
    with pytest.raises(ValueError, match="snapkv_budget"):
        check.validate_params(SimpleNamespace(extra_args={"snapkv_budget": -1}))


ROOT = Path(__file__).parents[5]
SOURCE = Path(importlib.import_module("snapkv_vllm").__file__).parent

SEAMS = {
    # Private methods of vLLM's that ours stand in for or go on with, by class.
    "Scheduler._get_local_prefix_cache_hit",
    "Scheduler._reserve_prefill_lookahead",
    "Scheduler._free_request",
    "FullAttentionManager._has_partial_local_hit",
    "GPUModelRunner._prepare_inputs",
    "GPUModelRunner._is_uniform_decode",
    # Attributes of vLLM's objects that are set, by file.
    "runners.py: runner.__class__",
    "runners.py: state.block_ids",
    "scheduler.py: setattr(EngineCore, SESSIONS_METHOD)",
    "scheduler.py: blocks.allocate_slots",
    "blocks.py: coordinator.cache_blocks",
    "kept_lengths.py: builder.build",
    "heads.py: builder.build",
    "heads.py: impl.forward",
    "heads.py: impl.do_kv_cache_update",
    "heads.py: single.num_heads",
    "heads.py: single.num_kv_heads",
    "layers.py: impl.forward",
    "layers.py: self.wrapped.forward_impl",
    "front/request_context.py: client.generate",
    "metric_files.py: values.MmapedDict",
    "front/rendering.py: setattr(renderer, name)",
    "front/rendering.py: setattr(request, XARGS)",
    "worker.py: config.logits_processors",
    "ray.py: app.state.server",
    # Private attributes of vLLM's objects that are read, by file.
    "front/routes.py: core._call_utility_async",
    "layers.py: layer.wrapped._k_scale",
    "layers.py: self.wrapped._q_scale",
    "refusals.py: layer._k_scale",
}
"""Whatever of vLLM the plugin changes, or uses though its name is private; docs/serving.md says
what needs it, and what vLLM offers in its place."""

OUR_OBJECTS = ("context", "current_context()", "history", "turn", "new", "counts", "manager")
OUR_OBJECTS += ("held", "found", "self._recorder")
"""What names of the source stand for objects of our own."""

PARSED = {"args", "own"}
"""Names for options that vLLM's parser has read, and for a tokenizer that we have loaded."""


def is_ours(node):
    """Whether an attribute belongs to what has it: to `self`, or to an object of our own."""
    of = ast.unparse(node.value)
    if of == "runner":  # whose attributes are those of the class that is laid over it
        return node.attr != "__class__"
    return of in ("self", "cls", "super()", *OUR_OBJECTS, *PARSED) or of.startswith("type(")


def touched(path):
    """What a file of the plugin sets or uses of vLLM's objects, as `SEAMS` spells it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and not is_ours(node):
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            if is_private or isinstance(node.ctx, ast.Store | ast.Del):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            of, name = map(ast.unparse, node.args[:2])
            if of not in PARSED:
                yield f"setattr({of}, {name})"


def overridden():
    """The private methods of vLLM's that ours replace, by the class of vLLM's that has them."""
    for module in OURS:
        for name, own, _ in replaced(importlib.import_module(f"snapkv_vllm.{module}")):
            if name.startswith("_"):
                yield f"{own.__qualname__.partition('.')[0]}.{name}"


def test_every_private_part_of_vllm_in_use_is_listed():
    """A new one must be added to the list and, with its reason, to docs/serving.md."""
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    by_file = {f"{name}: {one}" for name, path in files.items() for one in touched(path)}
    assert {one for one in SEAMS if ": " in one} == by_file
    methods = {one.partition(".")[2] for one in SEAMS if ": " not in one}
    assert methods == {one.partition(".")[2] for one in overridden()}


def test_serving_page_explains_every_private_part_in_use():
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    table = page.partition("## Which parts of vLLM does it use?")[2]
    for seam in SEAMS:
        name = seam.partition(": ")[2] or seam
        assert f"`{name}`" in table, name


def test_unlisted_use_of_a_private_part_is_found(tmp_path):
    lines = (
        "scheduler.running = []",
        "setattr(request, 'extra', 1)",
        "del output.orders",
        "runner.__class__ = Other",
        "engine._private()",
        "worker.step += 1",
    )
    for line in lines:
        path = tmp_path / "source.py"
        path.write_text(line)
        assert len(list(touched(path))) == 1, line


def test_kind_of_runner_is_found_by_its_methods(monkeypatch):
    """Its configuration may lack the field for the kind of runner."""
    from snapkv_vllm import runners

    laid = []
    for kind in (runners.CompressingFirstRunner, runners.CompressingSecondRunner):
        monkeypatch.setattr(kind, "extend", classmethod(lambda cls, runner: laid.append(cls)))
        runners.extend_runner(part(LAID_OVER[kind.__name__]))
        assert laid.pop() is kind


def test_only_the_given_runner_is_extended():
    from snapkv_vllm.runners import CompressingRunner

    class Runner:
        max_num_reqs, device = 4, torch.device("cpu")
        vllm_config = SimpleNamespace(additional_config={})

    one, other = Runner(), Runner()
    with pytest.MonkeyPatch.context() as patch:
        module = "snapkv_vllm.runners"
        patch.setattr(f"{module}.require_compatible", lambda **parts: None)
        patch.setattr(f"{module}.compression_stopwatch", lambda config, device: None)
        assert CompressingRunner.extend(one) is one
    assert isinstance(one, CompressingRunner)
    assert isinstance(one, Runner)
    assert type(other) is Runner
