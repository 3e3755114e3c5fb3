"""Settings and models shared by all tests."""

import os
import uuid
from pathlib import Path

# Before torch is imported: idle threads must not burn the cores that other processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Processes that tests start import from `tests`, too, of which every package has a part.
_PARTS = [str(path.parent) for path in Path(__file__).parent.glob("packages/*/tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([*_PARTS, os.environ.get("PYTHONPATH", "")])

import hypothesis
import pytest

from snapkv_app.models import LoadedModel, load

# A promise does not depend on how busy the machine is.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    """The offline demo model, SmolLM2-135M-Instruct in float32."""
    return load("demo")


@pytest.fixture(scope="session")
def tiny(demo) -> LoadedModel:
    """A tiny model with the demo's tokenizer, whose noise is the same every time."""
    from tests.lab.evaluate.tiny import tiny_loaded

    return tiny_loaded(demo.tokenizer)


@pytest.fixture(autouse=True)
def gates(tmp_path_factory, monkeypatch):
    """No model has a gate but the demo model, and what a test remembers; returns the folder.

    Converted models stay where they are, so the cache folder as a whole is not replaced.
    """
    folder = tmp_path_factory.getbasetemp() / f"gates-{uuid.uuid4().hex}"
    monkeypatch.setattr("snapkv.hf.known_gates.gates_folder", lambda: folder)
    return folder


def pytest_report_header() -> str:
    """Name the transformers release under test: the suite runs on the oldest and the newest."""
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}"
