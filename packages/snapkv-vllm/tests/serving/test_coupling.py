"""The table of what the plugin stands on in vLLM: how it is read, and that nothing is left out."""

import ast
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapkv_vllm
from snapkv_vllm.coupling import TABLE
from snapkv_vllm.sources import Part, Release

VLLM = {
    "vllm/__init__.py": "from .inner import *\n",
    "vllm/inner/__init__.py": """
from vllm.inner.deep import Child, free as released
LIMIT: int = 3
""",
    "vllm/inner/deep.py": """
from torch import Tensor
if True:
    class Parent:
        size: int
        def build(self, first, second, *, more=None): self.made, other = first, second
class Child(Parent["x"]):
    def run(self, step):
        self.prepare(step)
        return self.build(step, 1)
    @property
    def name(self): ...
def free(blocks): ...
""",
}


@pytest.fixture(params=["folder", "wheel"])
def release(request, tmp_path):
    """The same files, unpacked or not."""
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
            for path, text in VLLM.items():
                wheel.writestr(path, text)
        return Release(tmp_path / "vllm.whl")
    for path, text in VLLM.items():
        Path(tmp_path, path).parent.mkdir(parents=True, exist_ok=True)
        Path(tmp_path, path).write_text(text)
    return Release(tmp_path)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Part("inner.deep.Child", "", {"run": "step", "build": "first ..."}, "size made name"), []),
        (Part("inner.Child", "", {"build": "first second more"}), []),  # imported, inherited
        (Part("Child", "", {"build": "second ..."}), ["build takes (first, second, more), expe"]),
        (Part("inner.released", "", {"": "blocks"}), []),
        (Part("inner.released", "", {"": "blocks more"}), ["takes (blocks), expected (blocks,"]),
        (Part("inner.released", "", {"": ""}), ["takes (blocks), expected ()"]),
        (Part("inner", "", attributes="LIMIT MOST"), ["has no MOST"]),
        (Part("inner.deep.free or inner.free", ""), []),
        (Part("old.free or inner.deep.free", ""), []),
        (Part("old.free or older.free", ""), ["is not there"]),
        (Part("old.free", "", optional=True), []),
        (Part("inner.deep.Child.name", ""), []),
        (Part("inner.deep.Child", "", {"gone": "..."}, "other"), ["has no other", "has no gone"]),
        (Part("inner.Child", "", steps={"run": ["self.prepare(", "self.build("]}), []),
        (
            Part("inner.Child", "", steps={"run": ["self.build(", "self.prepare("]}),
            ["run does not"],
        ),
        (Part("inner.Child", "", steps={"": ["def run", "def name"]}), []),
        (Part("inner.deep", "", steps={"": ["class Parent", "def free"]}), []),
    ],
    ids=lambda one: one.name if isinstance(one, Part) else "",
)
def test_a_part_is_looked_up_in_files(release, part, expected):
    found = release.differences([part])
    assert [one.line[: len(line)] for one, line in zip(found, expected, strict=True)] == expected
    assert all(one.missing == ("does not go on" not in one.line) for one in found)


# Nothing of the plugin's own files may be left out.

SOURCES = Path(snapkv_vllm.__file__).parent
FILES = {path: ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}
LISTED = {name: part for part in TABLE for name in part.names}
KNOWN = {
    name
    for part in TABLE
    for name in (*part.attributes.split(), *part.signatures, part.name.rpartition(".")[2])
}
OF_VLLM = {  # what a variable or attribute of this name holds in the plugin, by the table
    "args": ("engine.arg_utils.EngineArgs", {"middleware", "api_key", "api_server_count"}),
    "block_pool": ("v1.core.block_pool.BlockPool", set()),
    "block_tables": ("v1.worker.gpu.block_table.BlockTables", set()),
    "builder": (
        "v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder",
        {"layer_names"},
    ),
    "c": ("config.VllmConfig", set()),
    "cache_config": ("config.CacheConfig", set()),
    "common": ("v1.attention.backend.CommonAttentionMetadata", set()),
    "compilation_config": ("config.CompilationConfig", set()),
    "coordinator": ("v1.core.kv_cache_coordinator.KVCacheCoordinator", set()),
    "impl": ("v1.attention.backends.cpu_attn.CPUAttentionBackendImpl", set()),
    "kv_cache_config": ("v1.kv_cache_interface.KVCacheConfig", set()),
    "kv_cache_manager": ("v1.core.kv_cache_manager.KVCacheManager", set()),
    "load_config": ("config.LoadConfig", set()),
    "model_config": ("config.ModelConfig", set()),
    "parallel_config": ("config.ParallelConfig", set()),
    "req_states": ("v1.worker.gpu.states.RequestState", set()),
    "sampling_params": ("SamplingParams", set()),
    "scheduler_config": ("config.SchedulerConfig", set()),
    "scheduler_output": ("v1.core.sched.output.SchedulerOutput", set()),
    "speculative_config": ("config.SpeculativeConfig", set()),
    "vllm_config": ("config.VllmConfig", set()),
}


def nodes(kind: type) -> Iterator[tuple[str, ast.AST]]:
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield f"{path.name}:{node.lineno}", node


def test_every_import_from_vllm_is_in_the_table():
    for place, node in nodes(ast.ImportFrom):
        top, _, module = (node.module or "").partition(".")
        if top == "vllm":
            for alias in node.names:
                name = f"{module}.{alias.name}".lstrip(".")
                assert name in LISTED, f"{place} imports {name}"
    assert not [place for place, node in nodes(ast.Import) if "vllm" in ast.unparse(node).split()]
    for place, node in nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "part_of_vllm":
            name = ast.literal_eval(node.args[0])
            assert name in {part.name for part in TABLE}, f"{place} asks for {name}"


def test_every_method_that_goes_on_with_vllms_own_is_in_the_table():
    made = Counter((place.partition(":")[0], node.name) for place, node in nodes(ast.FunctionDef))
    for place, node in nodes(ast.Attribute):
        of_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        of_ours = made[place.partition(":")[0], node.attr] > 1
        if of_super and not of_ours and node.attr not in ("__init__", "get_route_handler"):
            assert node.attr in KNOWN, f"{place} overrides {node.attr}"


def test_every_patched_attribute_is_in_the_table():
    """An attribute of an object that is not the method's own is set to something else."""
    stored = [
        (place, node) for place, node in nodes(ast.Attribute) if isinstance(node.ctx, ast.Store)
    ]
    own = {node.attr for _, node in stored if ast.unparse(node.value) == "self"} | {"server"}
    own |= {ast.unparse(node.target) for _, node in nodes(ast.AnnAssign)}
    for place, node in stored:
        owner = ast.unparse(node.value)
        if owner not in ("args", "runner") and not node.attr.startswith("_"):
            assert node.attr in own | KNOWN, f"{place} sets {owner}.{node.attr}"


def test_what_is_read_of_vllms_objects_is_in_the_table():
    for place, node in nodes(ast.Attribute):
        owner = getattr(node.value, "attr", getattr(node.value, "id", None))
        if owner in OF_VLLM and "states.py" not in place:
            name, more = OF_VLLM[owner]
            part = LISTED[name]
            listed = {*part.attributes.split(), *part.signatures, *more}
            assert node.attr in listed, f"{place} reads {owner}.{node.attr}, which {name} has not"


@pytest.mark.parametrize("file", ["blocks.py", "runners.py", "scheduler.py", "worker.py"])
def test_what_subclasses_read_of_themselves_is_theirs_or_in_the_table(file):
    tree = FILES[SOURCES / file]
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    read = {node.attr for node in attributes if ast.unparse(node.value) == "self"}
    assert read - own <= KNOWN
