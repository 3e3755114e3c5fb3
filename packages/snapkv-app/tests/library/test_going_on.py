"""Joined caches continue as any cache: questions, turns, files, copies and crops."""

import copy

import pytest
import torch
from transformers import DynamicCache

from snapkv import AdaKV, CompressedCache, FullCache, KeyDiff, SnapKV, default_policy
from snapkv.storage.ragged_store import RaggedStore
from snapkv_app.library import blend, joined_ids
from tests.families import call, random_ids, tiny_model
from tests.library import reference
from tests.library.test_blending import documents, few, uneven
from tests.oracle import masked_judge, masked_pass
from tests.pairs import pairs

HELD = {"whole": None, "even": few, "uneven": uneven}


def parts_of(model, kind, lengths=(12, 16, 9), prefix_tokens=0, **options):
    policies = None if kind == "whole" else [HELD[kind]() for _ in lengths]
    return documents(model, lengths, prefix_tokens, policies, **options)


def asked(tokens=5, seed=70):
    return random_ids(1, tokens, seed=seed)


def logits_over(model, cache, question):
    """Of a question over what a cache holds: masked attention over all tokens, layer by layer."""
    seen, plain, hidden = cache.get_seq_length(), DynamicCache(config=model.config), {}
    for index in range(len(cache.layers)):
        keys, values, held = reference.states_held(cache, index, seen)
        plain.update(keys.nan_to_num()[None], values.nan_to_num()[None], index)
        hidden[index] = ~held[None]
    end = seen + question.shape[1]
    mask, positions = torch.ones(1, end).long(), torch.arange(seen, end)[None]
    return masked_pass(masked_judge(model), plain, hidden, question, mask, positions)


def assert_close(own, wanted):
    assert torch.allclose(own, wanted, atol=1e-3 * float(wanted.abs().max()), rtol=1e-3)


@pairs(family=["llama", "glm4"], kind=list(HELD), share=[0, 0.3])
def test_question_attends_to_the_joined_documents(family, kind, share):
    model = tiny_model(family, "sdpa")
    cache = blend(model, parts_of(model, kind), FullCache(), recompute=share)
    wanted = logits_over(model, cache, asked())
    assert_close(call(model, cache, asked()), wanted)
    assert isinstance(cache.layers[0].store, RaggedStore) == (kind == "uneven")


@pytest.mark.parametrize(
    ("kind", "around"), [("whole", AdaKV), ("even", lambda policy: policy)], ids=["whole", "even"]
)
def test_question_votes_and_policy_compresses_the_joined_documents(kind, around):
    model, budget, question = tiny_model("llama"), 14, asked(6)
    parts = parts_of(model, kind)
    cache = blend(model, parts, around(SnapKV(budget, window_size=6)), recompute=0.2)
    held = [cache.kept_positions(index)[0] for index in cache.compressed_layers]
    ids = torch.cat([joined_ids(parts), question], dim=1)
    model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
    seen = ids.shape[1]
    for index, before in enumerate(held):
        kept = cache.kept_positions(index)[0]
        assert int((kept >= 0).sum()) == len(kept) * budget
        assert (kept[:, -6:] == torch.arange(seen - 6, seen)).all()
        for head, positions in enumerate(kept):
            assert set(positions[:-6].tolist()) <= {*before[head].tolist(), -1}


def test_default_policy_compresses_compressed_documents_again():
    model, question = tiny_model("llama"), asked(6)
    parts = parts_of(model, "even")
    ids = torch.cat([joined_ids(parts), question], dim=1)
    cache, whole = (blend(model, parts, policy, recompute=0) for policy in (None, FullCache()))
    for each in (cache, whole):
        model.generate(ids, past_key_values=each, max_new_tokens=1, do_sample=False)
    assert cache.policy == default_policy().policy
    assert all(map(torch.equal, *(map(of.kept_positions, range(2)) for of in (cache, whole))))


OPTIONS = (
    {},
    {"turns": "compress"},
    {"recall": "host"},
    {"quantize": "int8"},
    {"protect": [(0, 3)]},
)


@pairs(
    policy={"snapkv": SnapKV(16, window_size=4), "keydiff": KeyDiff(16, window_size=4)},
    options={",".join(options) or "none": options for options in OPTIONS},
    lengths=[(24,), (9, 15)],
)
def test_two_turns_equal_those_after_a_prompt_read_in_full(policy, options, lengths):
    """One document is reused as it is; several are read in full."""
    if "turns" in options and "rotation" in policy.needs:
        pytest.skip("refused by the cache")
    model = tiny_model("qwen3")
    parts = parts_of(model, "whole", lengths)
    share = 0.5 if len(lengths) == 1 else 1
    answers = []
    for cache in (
        blend(model, parts, policy, recompute=share, **options),
        CompressedCache(model, policy, **options),
    ):
        ids = torch.cat([joined_ids(parts), asked(7)], dim=1)
        for turn in (71, 72):
            ids = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=4,
                do_sample=False,
            )
            ids = torch.cat([ids, asked(5, turn)], dim=1)
        kept = [cache.kept_positions(index) for index in cache.compressed_layers]
        answers.append((ids, kept))
    (ids, kept), (wanted_ids, wanted) = answers
    assert torch.equal(ids, wanted_ids)
    assert all(map(torch.equal, kept, wanted))


@pytest.mark.parametrize("kind", HELD)
def test_saved_and_copied_caches_continue_alike_and_can_be_cropped(kind, tmp_path):
    model = tiny_model("llama")
    parts = parts_of(model, kind, prefix_tokens=2)
    ids = torch.cat([joined_ids(parts), asked()], dim=1)

    def answer(cache):
        return model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)

    cache = blend(model, parts, SnapKV(30, window_size=4))
    cache.save(tmp_path / "joined", beside={"input_ids": joined_ids(parts)})
    others = [CompressedCache.load(tmp_path / "joined", model), copy.copy(cache)]
    others.append(copy.deepcopy(cache))
    wanted = answer(cache)
    for other in others:
        assert torch.equal(answer(other), wanted)
    assert cache.report().seen_tokens == others[0].report().seen_tokens
    roomy = blend(model, parts, SnapKV(64, window_size=4))
    fresh = copy.copy(roomy)
    call(model, roomy, asked(6))
    roomy.crop(-6)
    assert roomy.get_seq_length() == joined_ids(parts).shape[1]
    assert torch.equal(call(model, roomy, asked(5)), call(model, fresh, asked(5)))


def test_blending_leaves_the_parts_unchanged():
    model = tiny_model("llama")
    for kind in HELD:
        parts = parts_of(model, kind, prefix_tokens=2)
        before = [
            [state.clone() for state in each.cache.layers[2].store.padded()] for each in parts
        ]
        first = blend(model, parts, recompute=0.3)
        second = blend(model, parts, recompute=0.3)
        assert torch.equal(call(model, first, asked()), call(model, second, asked()))
        for part, states in zip(parts, before, strict=True):
            assert all(map(torch.equal, part.cache.layers[2].store.padded(), states))


def test_quantized_parts_are_blended_by_their_dequantized_values():
    model, bits = tiny_model("llama"), "int8"
    parts = parts_of(model, "even", quantize=bits)
    whole = parts_of(model, "even")
    tolerance = 0.02
    for share in (0, 0.4):
        cache, wanted = (
            blend(model, each, FullCache(), recompute=share) for each in (parts, whole)
        )
        states = [reference.states_held(wanted, index, 37)[:2] for index in range(4)]
        for index, expected in enumerate(states):
            *own, held = reference.states_held(cache, index, 37)
            for state, exact in zip(own, expected, strict=True):
                assert (state[held] - exact[held]).abs().max() < tolerance * exact[held].abs().max()
