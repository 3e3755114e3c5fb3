"""Random work for a while: answers do not depend on load, needles are found, memory stays flat."""

import random
import time
from pathlib import Path

import pytest

from snapkv_lab.evaluate.haystack import python_topics
from snapkv_lab.experiments.prompts import make_documents
from tests.serving.vllm import soak
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.engines import Engine, blocks_bytes, greedy

PAGE = 32
GROWTH_BYTES = 200 << 20  # the allocator's and vLLM's own; a leaked prompt's states would exceed it


def resident_bytes():
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def busy(folder, seconds, seed):
    """Keep an engine busy; returns it, checked and empty, with (found, asked) by kind of budget."""
    from snapkv.app.models import load

    tokenizer, haystack = load("demo").tokenizer, python_topics()
    draw = random.Random(seed)
    documents = [
        document
        for tokens in (200, 400, 700, 1000)
        for document in make_documents(tokenizer, haystack, prompt_tokens=tokens, count=6)
    ]
    with Engine(
        folder,
        budget=256,
        parameters={"kernel_size": 13},
        max_model_len=1280,
        kv_cache_memory_bytes=blocks_bytes(61, PAGE),
        max_num_batched_tokens=300,
        enable_prefix_caching=True,
    ) as engine:
        asked, scores = {}, {"whole": [0, 0], "compressed": [0, 0]}
        deadline, before = time.monotonic() + seconds, None
        while time.monotonic() < deadline or engine.scheduler.requests:
            is_early = time.monotonic() < deadline
            if is_early and len(engine.scheduler.requests) < 12 and draw.random() < 0.5:
                document, budget = draw.choice(documents), draw.choice([0, 128, 256, 256, 400])
                sampling = greedy(draw.choice([8, 30, 90]), extra_args={"snapkv_budget": budget})
                (name,) = engine.start([document.prompt_ids], sampling)
                asked[name] = (
                    document,
                    "compressed" if budget >= 256 else "whole" if not budget else "",
                )
            if is_early and draw.random() < 0.03 and engine.scheduler.requests:
                gone = draw.choice(sorted(engine.scheduler.requests))
                engine.abort(gone.rpartition("-")[0])  # vLLM adds something of its own
            for output in engine.step():
                if output.finished and output.request_id in asked:
                    document, kind = asked.pop(output.request_id)
                    answer = list(output.outputs[0].token_ids)[: len(document.answer_ids)]
                    if kind:
                        scores[kind][0] += answer == document.answer_ids
                        scores[kind][1] += 1
            if before is None and time.monotonic() > deadline - seconds * 0.7:
                before = resident_bytes()
        assert engine.free_blocks == engine.all_blocks
        assert engine.leftovers() == []
        assert engine.preempted > 0
        assert resident_bytes() - before < GROWTH_BYTES
    return scores


def check(scores):
    found, asked = scores["compressed"]
    whole_found, whole_asked = scores["whole"]
    assert asked > 3
    assert whole_asked > 1
    assert found / asked >= whole_found / whole_asked - 0.1, scores


@pytest.mark.slow
def test_two_minutes_of_random_work(folder):
    check(busy(folder, 120, seed=1))


FEW = {"requests": 24, "clients": 10, "blocks": 44}
if SECOND_RUNNER:  # in Triton's interpreter
    FEW = {"requests": 12, "clients": 8, "blocks": 30}
DOCUMENTS = () if SECOND_RUNNER else ("documents",)
SERVERS = [
    pytest.param(server, marks=[] if server in ("limits", *DOCUMENTS) else pytest.mark.slow)
    for server in soak.SERVERS
]


@pytest.mark.parametrize("server", SERVERS)
def test_answers_do_not_depend_on_load(tmp_path, server):
    """A minute of what `make soak` does for longer."""
    found = soak.soak(soak.model(tmp_path), server, seed=0, **FEW)
    assert not found.wrong
    assert found.waits, "the pool was large enough"
