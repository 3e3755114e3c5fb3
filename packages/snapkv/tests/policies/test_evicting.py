"""Methods that evict during generation, by worked examples for each decode step."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from snapkv import CompressedCache, InvalidArgumentError
from snapkv.policies import (
    H2O,
    TOVA,
    PromptThenDecode,
    SnapKV,
    StreamingLLM,
)
from tests.families import call, random_ids, tiny_model
from tests.methods import METHODS
from tests.ops.states import random_layer, worked_prompt, worked_step

PROMPT, BUDGET = 60, 24
KINDS = {"special_ids": tuple(range(3, 12)), "punctuation_ids": tuple(range(12, 40))}


@pytest.mark.parametrize(
    "policy", [SnapKV(100), H2O(100), TOVA(100), StreamingLLM(100)], ids=lambda policy: policy.name
)
def test_gradients_equal_those_of_the_full_cache_if_nothing_is_evicted(policy):
    """The reference is transformers' own cache."""
    model, gradients = copy.deepcopy(tiny_model("llama")).requires_grad_(False), []
    embed, step = model.get_input_embeddings(), random_ids(1, 2, seed=1)
    for cache in (DynamicCache(config=model.config), CompressedCache(model, policy)):
        inputs = embed(random_ids(1, PROMPT)).requires_grad_()
        model(inputs_embeds=inputs, past_key_values=cache)
        logits = [model(step[:, [at]], past_key_values=cache).logits for at in (0, 1)]
        torch.cat(logits).log_softmax(-1)[..., 5].sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients)


def test_crop_is_refused_after_an_eviction():
    model = tiny_model("llama")
    cache = CompressedCache(model, METHODS["tova"])
    call(model, cache, random_ids(1, PROMPT))
    with pytest.raises(InvalidArgumentError, match="has already evicted other tokens"):
        cache.crop(-BUDGET)


# Worked examples.


PROMPT_ROWS = [
    [1.0],
    [0.5, 0.5],
    [0.6, 0.1, 0.3],
    [0.5, 0.1, 0.3, 0.1],
    [0.4, 0.1, 0.3, 0.1, 0.1],
    [0.3, 0.05, 0.25, 0.05, 0.15, 0.2],
]
DECODE_ROW = [0.3, 0.1, 0.35, 0.05, 0.2]  # over the positions 0, 2, 4, 5, 6


def test_h2o_equals_a_worked_example():
    policy = H2O(heavy=2, recent=2)
    selection = policy.select(worked_prompt(PROMPT_ROWS, 6))
    sums = torch.tensor([3.3, 0.85, 1.15, 0.25, 0.25, 0.2])
    torch.testing.assert_close(selection.scores[0, 0], sums)
    assert selection.keep_indices.tolist() == [[[0, 2, 4, 5]]]
    noted = torch.tensor([[[3.3, 1.15, 0.25, 0.2, 0.0]]])
    eviction = policy.evict(worked_step([DECODE_ROW], 5, scores=noted))
    after = torch.tensor([3.6, 1.25, 0.6, 0.25, 0.2])
    torch.testing.assert_close(eviction.scores[0, 0], after)
    assert eviction.keep_indices.tolist() == [[[0, 1, 3, 4]]], "token 4 goes, tokens 5 and 6 stay"


def test_tova_evicts_the_position_with_the_least_attention():
    eviction = TOVA(4).evict(worked_step([DECODE_ROW], 5, scores=torch.zeros(1, 1, 5)))
    assert eviction.keep_indices.tolist() == [[[0, 1, 2, 4]]], "position 5 has the least attention"


def test_tova_evicts_by_the_mean_of_all_heads():
    """The first of the means .3, .35 and .35 is the smallest; in the first head the last is."""
    rows = [0.5, 0.4, 0.1], [0.1, 0.3, 0.6]
    one, other = (worked_step([row], 3, scores=torch.zeros(1, 1, 3)) for row in rows)
    step = replace(one, queries=torch.cat([one.queries, other.queries], dim=1))
    assert TOVA(2).evict(step).keep_indices.tolist() == [[[1, 2]]]


def test_streaming_llm_keeps_the_first_and_the_last_tokens():
    selection = StreamingLLM(start=2, recent=3).select(worked_prompt([[0.1] * 10], 10))
    assert selection.keep_indices.tolist() == [[[0, 1, 7, 8, 9]]]


def test_h2o_after_snapkv_equals_a_worked_example():
    """SnapKV keeps tokens that H2O would evict, and H2O continues with its own sums of them."""
    policy = PromptThenDecode(prompt=SnapKV(4, window_size=1, kernel_size=1), decode=H2O(4))
    selection = policy.select(
        worked_prompt([*PROMPT_ROWS[:5], [0.1, 0.2, 0.1, 0.25, 0.15, 0.2]], 6)
    )
    assert selection.keep_indices.tolist() == [[[1, 3, 4, 5]]], "the last query alone votes"
    sums = torch.tensor([3.1, 1.0, 1.0, 0.45, 0.25, 0.2])
    torch.testing.assert_close(selection.scores[0, 0], sums)
    noted = selection.scores[..., [1, 3, 4, 5]]
    step = worked_step(
        [[0.05, 0.5, 0.15, 0.1, 0.2]], 5, scores=torch.nn.functional.pad(noted, (0, 1))
    )
    eviction = policy.evict(step)
    torch.testing.assert_close(
        eviction.scores[0, 0], torch.tensor([1.05, 0.95, 0.4, 0.3, 0.2]), msg=str(eviction.scores)
    )
    assert eviction.keep_indices.tolist() == [[[0, 1, 3, 4]]]


def test_h2o_sums_are_per_query_head_if_query_heads_are_stored_separately():
    """The reference is a layer with a KV head for every query head."""
    policy = PromptThenDecode(
        prompt=SnapKV(6, window_size=2, group_reduce="none"), decode=H2O(heavy=4, recent=4)
    )
    grouped = random_layer(0, query_heads=4, kv_heads=2, prompt_tokens=20, query_tokens=20)
    twins = {name: getattr(grouped, name).repeat_interleave(2, 1) for name in ("keys", "values")}
    apart = policy.select(replace(grouped, **twins))
    together = policy.select(grouped)
    assert torch.equal(together.keep_indices, apart.keep_indices)
    torch.testing.assert_close(together.scores, apart.scores)
    model, ids = tiny_model("llama"), random_ids(2, PROMPT)
    cache = CompressedCache(model, policy)
    model.generate(ids, past_key_values=cache, max_new_tokens=12, pad_token_id=0)
    assert cache.kept_positions(0).shape == (2, 8, 8)
