"""Engines and documents for the tests that run vLLM; `make test-serving` runs them."""

import os

import pytest

# One engine in this process, on whatever core is free, and no output but errors.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_collection_modifyitems(items):
    """Everything in this folder needs vLLM, whose own warnings are not ours to fix."""
    for item in items:
        if "serving/vllm" in item.nodeid:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def folder() -> str:
    """The demo model as a folder."""
    from snapkv.app.models import place_of

    return place_of("demo")


@pytest.fixture(scope="session")
def text_ids() -> list[int]:
    """Ten thousand tokens of prose."""
    from pathlib import Path

    from snapkv.app.models import load

    text = Path(__file__).parents[3].joinpath("LICENSE").read_text(encoding="utf-8")
    return load("demo").tokenizer(text * 5)["input_ids"][:10_000]
