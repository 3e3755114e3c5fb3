"""Models and documents for the tests that run vLLM.

`make test-serving` runs them twice, once on each of vLLM's model runners, since a process has one:
on the second, vLLM's default, which the folder `interpreter` brings to machines without a GPU, and
on the first while there is one. The tests of the demo model run on the first alone: Triton's
interpreter is too slow for it. So do those of what no runner has a part in: the runners differ in
where new tokens go, what they count for themselves, and which graphs they replay.
"""

import os

import pytest

# One engine in this process, on whatever core is free, and no output but errors.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Of numba, which proposes n-grams: its OpenMP layer would raise the number of threads for all of
# the process, and without AVX-512 the next engine of stock vLLM then answers wrongly.
os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")

SECOND_RUNNER = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
OF_THE_DEMO = {"folder"}
OF_NO_RUNNER = {
    "test_accounting.py",
    "test_adapters.py",
    "test_agents_http.py",
    "test_fp8.py",
    "test_middleware.py",
    "test_refusals.py",
    "test_routes.py",
    "test_safety.py",
    "test_seams.py",
    "test_server.py",
    "test_sessions_accounting.py",
    "test_spans.py",
}
SLOW_ON_SECOND = [pytest.mark.slow] if SECOND_RUNNER else []


def pytest_collection_modifyitems(config, items):
    """Everything in this folder needs vLLM, whose own warnings are not ours to fix."""
    ours = [item for item in items if "serving/vllm" in item.nodeid]
    for item in ours:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.filterwarnings("default"))
    if SECOND_RUNNER:
        others = [
            item
            for item in ours
            if OF_THE_DEMO & set(item.fixturenames) or item.path.name in OF_NO_RUNNER
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def second_runner() -> bool:
    """Whether this process has vLLM's second model runner."""
    return SECOND_RUNNER


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A small random model for both runners, which may read long prompts."""
    from tests.serving.vllm.models import SmallModel

    return SmallModel(tmp_path_factory.mktemp("small"), max_position_embeddings=20_000)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A small random model with a tokenizer, for servers."""
    from tests.serving.vllm.models import with_tokenizer

    return with_tokenizer(tmp_path_factory.mktemp("served"), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def many_ids() -> list[int]:
    """Ten thousand random tokens."""
    from tests.serving.vllm.models import ids_of

    return ids_of(10_000)


@pytest.fixture(scope="session")
def folder() -> str:
    """The demo model as a folder."""
    from snapkv_app.models import place_of

    return place_of("demo")


@pytest.fixture(scope="module")
def config(folder):
    """vLLM's arguments and its configuration for the demo model, for a `Site`."""
    from tests.serving.vllm.sites import configured

    return configured(folder)


@pytest.fixture
def client(site):
    """Of a module's `site`, for as long as a test."""
    with site.asking() as running:
        yield running
