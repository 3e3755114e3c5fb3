"""Two processes: heads or layers shared out among them, or engines of their own."""

import pytest

from snapkv import SnapKV
from tests.serving.vllm.models import ids_of, with_tokenizer
from tests.serving.vllm.servers import Server

PROMPTS = [ids_of(tokens, seed=tokens) for tokens in (70, 200, 350)]

# vLLM's CPU worker makes room for what a pipeline stage receives only when it warms up for
# compiling: with --enforce-eager stock vLLM ends its engine at the first request.
TRACED = ("--no-enforce-eager", "--compilation-config", '{"mode": 1, "backend": "eager"}')


@pytest.fixture(scope="module")
def even_heads(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("even-heads"))


def answers(folder, budget, *options):
    """Greedy answers of a few prompts, from a server with these options."""
    common = ["--policy", "snapkv", "--budget", str(budget), "--max-num-batched-tokens", "256"]
    with Server(folder, *common, *options, model=folder, longest=512) as server:
        completions = server.client().completions
        given = [
            completions.create(
                model="demo",
                prompt=ids,
                max_tokens=16,
                temperature=0,
                extra_body={
                    "return_token_ids": True,
                    "ignore_eos": True,
                },
            )
            for ids in PROMPTS
        ]
        return [one.choices[0].token_ids for one in given], server.metric(
            "snapkv:requests_total", outcome="compressed"
        )


@pytest.mark.parametrize(
    "options",
    [
        ("--tensor-parallel-size", "2"),
        pytest.param(("--data-parallel-size", "2"), marks=pytest.mark.slow),
        ("--pipeline-parallel-size", "2", *TRACED),
    ],
    ids=["tensor", "data", "pipeline"],
)
def test_two_processes_answer_as_the_library_does(even_heads, options, second_runner):
    if second_runner and "--pipeline-parallel-size" in options:
        pytest.skip("Triton's interpreter ends vLLM's profile run of a stage: All-NaN slice")
    got, compressed = answers(even_heads.folder, 64, *options)
    assert got == [even_heads.answer(ids, SnapKV(64), 16) for ids in PROMPTS]
    assert compressed == 3
