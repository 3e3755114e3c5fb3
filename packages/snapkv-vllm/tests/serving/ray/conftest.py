"""A local Ray with two replicas of a tiny model; `make test-ray` runs these tests."""

import os

import pytest

from snapkv_vllm import Sessions
from tests.serving.vllm.models import with_tokenizer

# Engines on whatever core is free, and no output but errors; Ray's actors get these too.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

OPTIONS = {
    "policy": "snapkv",
    "budget": 64,
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 100 << 20,
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "served_model_name": ["demo"],
    "sessions": Sessions(),
    "enable_prompt_tokens_details": True,
}
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def pytest_collection_modifyitems(items):
    """Mark all tests of this folder as needing Ray, and let them pass with warnings of Ray."""
    for item in items:
        if "serving/ray" in item.nodeid:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A small random model with a tokenizer."""
    return with_tokenizer(tmp_path_factory.mktemp("even-heads"))


@pytest.fixture(scope="session")
def ray_address(model):
    """The address at which the two replicas answer. Ray is stopped after the last test."""
    import socket

    import ray
    from ray import serve

    from snapkv_vllm.ray import application

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False)
    serve.start(http_options={"port": port})
    serve.run(
        application(
            model.folder,
            replicas=2,
            actor_options={"num_cpus": 1},
            deployment_options={
                "health_check_period_s": 1,
                "request_router_config": {"request_router_class": ROUTER},
            },
            **OPTIONS,
        )
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
