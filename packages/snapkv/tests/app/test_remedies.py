"""A policy that is found to keep an answer gives it, and one that is not does not."""

import pytest

from snapkv import H2O, AdaKV, FastGen, FullCache, KVCodes, KVzip, SnapKV
from snapkv.app.answering import answer
from snapkv.app.models import LoadedModel
from snapkv.app.prompts import Prompt
from snapkv.app.remedies import Candidate, first_that_keeps
from snapkv.app.settings import GenerationSettings
from tests.families import random_ids, tiny_model

SETTINGS = GenerationSettings(max_new_tokens=8)


@pytest.fixture(scope="module")
def full(tiny, prompt):
    return answer(tiny, prompt, FullCache(), SETTINGS)


def assert_told(loaded, prompt, policy, quantize=None):
    """Whether it keeps the answer, which trying it says as well."""
    policy = loaded.completed(policy)
    full = answer(loaded, prompt, FullCache(), SETTINGS)
    given = answer(loaded, prompt, policy, SETTINGS, quantize=quantize)
    tried = [Candidate(policy, quantize)]
    found = first_that_keeps(loaded, prompt, SETTINGS, full.token_ids, tried)
    assert not found.untold
    assert (found.keeper == 0) == (given.token_ids == full.token_ids)
    return found.keeper == 0


def test_trying_says_what_answering_gives(tiny, prompt):
    small, ratio = SnapKV(20, window_size=4), SnapKV(keep_ratio=0.9, window_size=16)
    policies = [small, ratio, AdaKV(SnapKV(200, window_size=16, kernel_size=13)), H2O(200), H2O(20)]
    policies += [FastGen(0.999)]
    assert {assert_told(tiny, prompt, policy) for policy in policies} == {True, False}
    hidden = prompt.hiding("Where is the key?")
    read_twice = [KVzip(budget, window_size=8) for budget in (16, 1000)]
    assert {assert_told(tiny, hidden, policy) for policy in read_twice} == {True, False}


def test_few_bits_are_tried_as_they_answer(tiny, prompt):
    """Token by token: what is generated becomes codes, too."""
    codes = [KVCodes(keys=bits, values=bits, recent_tokens=0) for bits in (4, 8)]
    assert {assert_told(tiny, prompt, FullCache(), each) for each in codes} == {True, False}


def test_the_first_of_several_is_found_on_one_reading(tiny, prompt, full):
    candidates = [SnapKV(8, window_size=4), FullCache(), SnapKV(1000, window_size=16)]
    for number, keeper in ((3, 1), (1, None), (0, None)):
        tried = list(map(Candidate, candidates[:number]))
        found = first_that_keeps(tiny, prompt, SETTINGS, full.token_ids, tried)
        assert (found.keeper, found.untold) == (keeper, "")


def test_what_cannot_be_tried_is_told(tiny, prompt, full):
    drawn = GenerationSettings(max_new_tokens=8, temperature=0.7)
    found = first_that_keeps(tiny, prompt, drawn, [1, 2], [Candidate(FullCache())])
    assert found.keeper is None
    assert found.untold == "the answers are drawn, at temperature 0.7"
    other = [*full.token_ids[:2], 11, *full.token_ids[3:]]  # the full cache does not repeat it
    found = first_that_keeps(tiny, prompt, SETTINGS, other, [Candidate(FullCache())])
    assert found.keeper is None
    assert "to tell" in found.untold


def test_what_the_checkpoint_does_to_logits_counts(tiny, prompt, full, monkeypatch):
    monkeypatch.setattr(tiny.model.generation_config, "repetition_penalty", 0.01)
    penalised = answer(tiny, prompt, FullCache(), SETTINGS)
    assert penalised.token_ids != full.token_ids
    assert assert_told(tiny, prompt, FullCache())


class Given(Prompt):
    """A prompt of random tokens, for a model without a tokenizer."""

    def token_ids(self, tokenizer):
        return random_ids(1, 60)


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2"])
def test_layers_that_slide_over_a_window_are_as_they_are_behind_the_prompt(demo, family):
    model = tiny_model(family)
    loaded = LoadedModel(model=model, tokenizer=demo.tokenizer, name=family, revision=None)
    for budget in (12, 56):
        assert_told(loaded, Given(text=""), SnapKV(budget, window_size=4))
