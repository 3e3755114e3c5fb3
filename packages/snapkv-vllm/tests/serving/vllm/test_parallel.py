"""Two processes that share heads or layers, or have engines of their own."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional

from snapkv import AdaKV, CompressedCache, SnapKV
from snapkv.policies import Selection
from tests.serving.vllm.conftest import SECOND_RUNNER
from tests.serving.vllm.models import generated, ids_of, with_tokenizer
from tests.serving.vllm.servers import Server

PROMPTS = [ids_of(tokens, seed=tokens) for tokens in (70, 200, 350)]
LONGEST, BUDGET, TOKENS = 512, 64, 16

# vLLM's CPU worker makes room for what a pipeline stage receives only when it warms up for
# compiling: with --enforce-eager stock vLLM ends its engine at the first request.
TRACED = ("--no-enforce-eager", "--compilation-config", '{"mode": 1, "backend": "eager"}')

# Each by default on one runner. Triton's interpreter ends vLLM's profile run of a stage: All-NaN.
TENSOR = pytest.param(
    ("--tensor-parallel-size", "2"), marks=[] if SECOND_RUNNER else [pytest.mark.slow], id="tensor"
)
DATA = pytest.param(("--data-parallel-size", "2"), marks=pytest.mark.slow, id="data")
PIPELINE = pytest.param(("--pipeline-parallel-size", "2", *TRACED), id="pipeline")


def answer(server, ids, **settings):
    body = {"prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    own = {"return_token_ids": True, "vllm_xargs": settings}
    status, said = server.post("/v1/completions", body | own)
    assert status == 200, said
    return json.loads(said)["choices"][0]["token_ids"]


@dataclass(frozen=True)
class SharesOfHalves(AdaKV):
    """Each half of the heads shares its own budget out, as each of two processes does."""

    def select(self, layer):
        """Both halves as if the other were not there."""
        halves = [
            replace(layer, queries=queries, keys=keys, values=values)
            for queries, keys, values in zip(
                *(states.chunk(2, dim=1) for states in (layer.queries, layer.keys, layer.values)),
                strict=True,
            )
        ]
        chosen = [super(SharesOfHalves, self).select(half) for half in halves]
        if None in chosen:
            return None
        keep = [selection.keep_indices for selection in chosen]
        longest = max(one.shape[-1] for one in keep)
        filled = [functional.pad(one, (longest - one.shape[-1], 0), value=-1) for one in keep]
        counts = torch.cat([(one >= 0).sum(dim=-1) for one in keep], dim=1)
        return Selection(
            keep_indices=torch.cat(filled, dim=1),
            prompt_tokens=layer.keys.shape[2],
            head_tokens=counts,
        )


def require_one_cache_for_a_session(server, model):
    """Each process notes which tokens its own heads hold."""
    cache, ids = CompressedCache(model.model, SnapKV(BUDGET), turns="compress"), []
    for turn in range(3):
        ids += ids_of(90, seed=turn)
        expected = generated(model.model, ids, cache, TOKENS)
        assert answer(server, ids, snapkv_session="one") == expected, turn
        ids += expected
    assert server.metric("snapkv:session_requests_total") == 2


@pytest.mark.slow
def test_each_process_distributes_its_own_budget_among_its_heads(tmp_path):
    model = with_tokenizer(tmp_path)
    own = ["--policy", "adakv", "--budget", str(BUDGET), "--tensor-parallel-size", "2"]
    with Server(tmp_path, *own, model=model.folder, longest=LONGEST) as server:
        answers = [answer(server, ids) for ids in PROMPTS]
    policy = SharesOfHalves(SnapKV(BUDGET))
    assert answers == [model.answer(ids, policy, TOKENS) for ids in PROMPTS]
    assert answers != [model.answer(ids, AdaKV(SnapKV(BUDGET)), TOKENS) for ids in PROMPTS]


@pytest.mark.parametrize("options", [TENSOR, DATA] if SECOND_RUNNER else [TENSOR, DATA, PIPELINE])
def test_answers_of_two_processes_equal_those_of_the_library(options, tmp_path):
    model = with_tokenizer(tmp_path)
    own = ["--policy", "snapkv", "--budget", str(BUDGET), "--max-num-batched-tokens", "256"]
    own += ["--sessions"] if "--tensor-parallel-size" in options else []
    with Server(tmp_path, *own, *options, model=model.folder, longest=LONGEST) as server:
        answers = [answer(server, ids) for ids in PROMPTS]
        assert answers == [model.answer(ids, SnapKV(BUDGET), TOKENS) for ids in PROMPTS]
        assert server.metric("snapkv:requests_total", outcome="compressed") == len(PROMPTS)
        if "--tensor-parallel-size" in options:
            require_one_cache_for_a_session(server, model)
