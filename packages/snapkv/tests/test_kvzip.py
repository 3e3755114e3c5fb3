"""KVzip: its scores equal those of plain attention while the text is read a second time."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from snapkv import (
    AcrossLayers,
    AdaKV,
    CacheMismatchError,
    CompressedCache,
    InvalidArgumentError,
    InvalidTypeError,
    KVzip,
    PromptTooLongError,
    PyramidKV,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.kvzip import read_context, read_layers, read_twice
from snapkv.policies.kvzip import most_attention
from tests.families import call, generated, random_ids, tiny_config, tiny_model
from tests.ops.states import worked_layer
from tests.oracle import unwrapped

TOKENS, BUDGET, WINDOW, CHUNK, SINKS = 70, 30, 4, 32, 4
POLICY = KVzip(BUDGET, window_size=WINDOW, chunk_tokens=CHUNK)
INSTRUCTION = (5, 6, 7)


def entering(model, ids):
    """Return the attentions, the cache, and the input of every attention module, (B, T, hidden)."""
    found, hooks = {}, []
    for index, layer in enumerate(model.model.layers):

        def note(_, inputs, named, index=index):
            found[index] = named.get("hidden_states", inputs[0] if inputs else None)

        hooks.append(layer.self_attn.register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        output = model(
            ids, past_key_values=DynamicCache(config=model.config), output_attentions=True
        )
    for hook in hooks:
        hook.remove()
    return output.attentions, output.past_key_values, found


def plain_scores(model, ids, *, plus):
    """Return the highest attention by layer and query head, weighted for KVzip+.

    It is computed from the attention weights, values and states of transformers.
    """
    reference, best = unwrapped(model, "eager"), {}
    for piece in ids.split(CHUNK, dim=1):
        before = torch.tensor([INSTRUCTION]).expand(ids.shape[0], -1)
        weights, states, read = entering(reference, torch.cat([ids, before, piece], dim=1))
        for index, weight in enumerate(weights):
            shares = weight[:, :, TOKENS:, :TOKENS]
            if plus:
                heads, values = weight.shape[1], states.layers[index].values[:, :, :TOKENS]
                values = values.repeat_interleave(heads // values.shape[1], dim=1)
                columns = reference.model.layers[index].self_attn.o_proj.weight.chunk(heads, dim=1)
                added = torch.stack([values[:, h] @ columns[h].T for h in range(heads)], dim=1)
                shares = shares * added.norm(dim=-1)[:, :, None]
                shares = shares / read[index][:, TOKENS:].norm(dim=-1)[:, None, :, None]
            most = shares.amax(dim=2).detach()
            best[index] = most if index not in best else best[index].maximum(most)
    return best


@pytest.mark.parametrize(
    ("family", "rows", "plus"),
    [
        ("llama", 2, False),
        ("qwen3", 2, False),
        ("deepseek_v3", 2, False),
        ("llama", 2, True),
        ("phi3", 1, True),
    ],
)
def test_kept_positions_received_the_most_attention_in_the_second_reading(family, rows, plus):
    model, ids = tiny_model(family, "eager"), random_ids(rows, TOKENS)
    policy = replace(POLICY, plus=plus)
    prompts = read_layers(model, ids, CompressedCache(model, policy), instruction_ids=INSTRUCTION)
    cache, other = (
        read_context(model, ids, each, instruction_ids=INSTRUCTION) for each in (policy, POLICY)
    )
    for index, scores in plain_scores(model, ids, plus=plus).items():
        heads = prompts[index].received.shape[1]
        expected = scores.view(rows, heads, -1, TOKENS).amax(dim=2)
        torch.testing.assert_close(prompts[index].received, expected, atol=1e-5, rtol=1e-4)
        kept = policy.select(prompts[index]).keep_indices
        assert (kept[..., :SINKS] == torch.arange(SINKS)).all()
        assert torch.equal(cache.kept_positions(index), kept)
        assert torch.equal(other.kept_positions(index), kept) != plus, "or nothing is shown here"
    assert cache.get_seq_length() == TOKENS
    assert cache.report().kept_tokens == BUDGET
    if plus:
        uneven = read_context(model, ids, AdaKV(policy), instruction_ids=INSTRUCTION)
        assert uneven.report().kept_tokens == BUDGET
    assert all(not layer.self_attn._forward_pre_hooks for layer in model.model.layers)


def test_kvzip_plus_equals_a_worked_example():
    """Two queries, with states of norm 1 and 4, follow two positions with value norms 1 and 3.

    The first pays them (1/3, 1/3), so 1/3 and 1; the second, of logits (ln 8, 0) beside its own
    and the first's of 0, pays (8/11, 1/11), over 4 (2/11, 3/44). So the most is 1/3 and 1.
    """
    seen = worked_layer(
        keys=torch.tensor([[[[1.0], [0.0], [0.0], [0.0]]]]),
        values=torch.tensor([[[[1.0], [3.0], [9.0], [9.0]]]]),
        queries=torch.tensor([[[[0.0], [math.log(8)]]]]),
    )
    plain = most_attention(seen, 2)
    assert plain[0, 0].tolist() == pytest.approx([8 / 11, 1 / 3])
    weights = {
        "query_norms": torch.tensor([[1.0, 4.0]]),
        "value_norms": torch.tensor([[[1.0, 3.0]]]),
    }
    assert most_attention(seen, 2, **weights)[0, 0].tolist() == pytest.approx([1 / 3, 1.0])


def short_model(positions):
    config = tiny_config("llama", max_position_embeddings=positions)
    return AutoModelForCausalLM.from_config(config).eval()


def test_pieces_of_the_second_reading_fit_into_the_remaining_positions():
    torch.manual_seed(0)
    model, ids, seen = short_model(TOKENS + 13), random_ids(1, TOKENS), []
    hook = model.model.rotary_emb.register_forward_pre_hook(
        lambda _, inputs, named: seen.append(int(named["position_ids"].max())), with_kwargs=True
    )
    with hook:
        cache = read_context(model, ids, POLICY, instruction_ids=INSTRUCTION)
    assert max(seen) == TOKENS + 13 - 1
    assert cache.report().kept_tokens == BUDGET


def test_second_reading_is_refused_if_it_is_unnecessary_or_impossible():
    model, ids = tiny_model("llama"), random_ids(1, TOKENS)
    for policy in (SnapKV(BUDGET, window_size=4), PyramidKV(BUDGET, window_size=4)):
        with pytest.raises(InvalidArgumentError, match="policy: expected KVzip"):
            read_context(model, ids, policy)
    begun = CompressedCache(model, POLICY)
    begun.layers[0].update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16))
    with pytest.raises(CacheMismatchError, match="cache: expected an empty cache, but got"):
        read_twice(model, ids, begun)
    with pytest.raises(
        PromptTooLongError, match=r"^input_ids: .* leave no space .* Use a shorter t"
    ):
        read_context(short_model(TOKENS + 3), ids, POLICY, instruction_ids=INSTRUCTION)
    with pytest.raises(UnsupportedModelError, match="model: every layer must have full attention"):
        read_context(tiny_model("gemma3_text"), ids, POLICY)
    with pytest.raises(InvalidArgumentError, match="policy: expected KVzip or a policy"):
        read_context(model, ids, AdaKV(SnapKV(BUDGET, window_size=4)))
    with pytest.raises(
        InvalidArgumentError, match=r"^policy: .* read the prompt a second time\. Use "
    ):
        model(ids, past_key_values=CompressedCache(model, POLICY))
    for none in (ids[0], ids.tolist(), ids.float()):
        with pytest.raises(InvalidTypeError, match="token_ids: expected a"):
            read_context(model, none, POLICY)
    with pytest.raises(
        InvalidArgumentError, match="input_ids, tokens: expected a value of at least 1"
    ):
        read_context(model, ids[:, :0], POLICY)
    with pytest.raises(InvalidArgumentError, match="chunk_tokens: expected a value of at least 1"):
        KVzip(chunk_tokens=0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("pieces", [None, 20])
def test_single_reading_is_refused_before_any_layer_has_changed(family, pieces):
    model, ids = tiny_model(family), random_ids(1, TOKENS)
    cache, said = (
        CompressedCache(model, AcrossLayers(POLICY)),
        "cannot be used for a prompt that is read only once",
    )
    for read in (functools.partial(generated, prefill_chunk_size=pieces), call):
        with pytest.raises(InvalidArgumentError, match=f"policy: .*{said}"):
            read(model, cache, ids)
        assert not any(layer.is_initialized for layer in cache.layers)
        assert not cache.prompt_state.is_broken
