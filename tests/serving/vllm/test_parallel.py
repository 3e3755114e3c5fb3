"""Two processes: heads shared out among them, or engines of their own."""

import pytest

from snapkv.app.models import load
from tests.families import random_ids, tiny_config
from tests.serving.vllm.servers import Server


@pytest.fixture(scope="module")
def even_heads(tmp_path_factory):
    """A model whose heads two processes can share; the demo has three KV heads."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("even-heads")
    torch.manual_seed(0)
    tokenizer = load("demo").tokenizer
    sizes = {"hidden_size": 256, "num_key_value_heads": 4, "vocab_size": len(tokenizer)}
    config = tiny_config("llama", **sizes)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" not in name:
                weight.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def answers(folder, budget, *options):
    """Greedy answers of a few prompts, from a server with these options."""
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (70, 200, 350)]
    common = ["--budget", str(budget), "--max-num-batched-tokens", "256"]
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
            for ids in prompts
        ]
        return [one.choices[0].token_ids for one in given], server.metric(
            "snapkv:requests_total", outcome="compressed"
        )


def library(folder, budget):
    import torch
    from transformers import AutoModelForCausalLM

    from snapkv import CompressedCache, SnapKV

    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for length in (70, 200, 350):
        ids = random_ids(1, length, seed=length)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=CompressedCache(model, SnapKV(budget)),
            max_new_tokens=16,
            do_sample=False,
        )
        found.append(output[0, length:].tolist())
    return found


@pytest.mark.parametrize(
    "options",
    [("--tensor-parallel-size", "2"), ("--data-parallel-size", "2")],
    ids=["tensor", "data"],
)
def test_two_processes_answer_as_the_library_does(even_heads, options):
    got, compressed = answers(even_heads, 64, *options)
    assert got == library(even_heads, 64)
    assert compressed == 3
