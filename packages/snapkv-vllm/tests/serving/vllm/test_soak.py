"""Random work under load: answers do not depend on load, and no memory leaks."""

import pytest

from tests.serving.vllm import soak
from tests.serving.vllm.conftest import SECOND_RUNNER

GROWTH_BYTES = 200 << 20  # the allocator's and vLLM's own; a leaked prompt's states would exceed it
FEW = {"requests": 24, "clients": 10, "blocks": 44}
if SECOND_RUNNER:  # in Triton's interpreter
    FEW = {"requests": 12, "clients": 8, "blocks": 34}
SESSIONS = () if SECOND_RUNNER else ("sessions",)
SERVERS = [
    pytest.param(server, marks=[] if server in ("limits", *SESSIONS) else pytest.mark.slow)
    for server in soak.SERVERS
]


@pytest.mark.parametrize("server", SERVERS)
def test_answers_do_not_depend_on_load(tmp_path, server):
    """This test does for a minute what `make soak` does for longer."""
    found = soak.soak(soak.model(tmp_path), server, seed=0, **FEW)
    assert not found.wrong
    assert found.waits or server == "sessions", "the pool was large enough"


@pytest.mark.slow
def test_random_work_leaks_no_memory(tmp_path):
    model = soak.model(tmp_path)
    before = None
    for seed in range(6):
        assert not soak.soak(model, "snapkv", seed=seed, requests=60).wrong
        before = before or soak.resident_bytes()
    assert soak.resident_bytes() - before < GROWTH_BYTES
