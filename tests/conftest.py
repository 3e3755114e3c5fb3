"""Settings and models shared by all tests."""

import os

# Before torch is imported: idle threads must not burn the cores that other processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from snapkv.app.models import LoadedModel, load


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    """The offline demo model, SmolLM2-135M-Instruct in float32."""
    return load("demo")


def pytest_report_header() -> str:
    """Name the transformers release under test: the suite runs on the oldest and the newest."""
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}"
