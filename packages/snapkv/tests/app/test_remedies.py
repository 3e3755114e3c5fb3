"""A policy that is found to keep an answer gives it, and one that is not does not."""

import pytest

from snapkv import H2O, AdaKV, DuoAttention, FastGen, FullCache, KVzip, SnapKV
from snapkv.app.answering import answer
from snapkv.app.models import LoadedModel
from snapkv.app.prompts import Prompt, question_prompt
from snapkv.app.remedies import first_that_keeps
from snapkv.app.settings import GenerationSettings
from tests.families import random_ids, tiny_model

SETTINGS = GenerationSettings(max_new_tokens=8)
SCENES = [
    f"The {person} waited by the {place} until the {thing} had gone."
    for person in ("baker", "sailor", "farmer", "doctor")
    for place, thing in (("door", "rain"), ("bridge", "crowd"), ("window", "light"))
]
NUMBER = "The magic number of the gate is 4815162."
QUESTION = "What is the magic number of the gate?"


@pytest.fixture(scope="module")
def prompt(demo):
    document = " ".join([*SCENES[:6], NUMBER, *SCENES[6:]])
    start = "The magic number of the gate is"
    return question_prompt(demo.tokenizer, document, QUESTION, answer_start=start)


@pytest.fixture(scope="module")
def full(demo, prompt):
    return answer(demo, prompt, FullCache(), SETTINGS)


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(64, window_size=16),
        SnapKV(64, window_size=16, pooling="fading"),
        SnapKV(keep_ratio=0.9, window_size=16),
        AdaKV(SnapKV(160, window_size=16, kernel_size=13)),
        H2O(200),
        H2O(64),
        FastGen(0.999),
        DuoAttention(recent_tokens=64),
    ],
    ids=repr,
)
def test_trying_says_what_answering_gives(demo, prompt, full, policy):
    own = demo.completed(policy)
    given = answer(demo, prompt, own, SETTINGS)
    found = first_that_keeps(demo, prompt, SETTINGS, full.token_ids, [own])
    assert not found.untold
    assert (found.keeper == 0) == (given.token_ids == full.token_ids)


def test_the_first_of_several_is_found_on_one_reading(demo, prompt, full):
    candidates = [SnapKV(24, window_size=16), FullCache(), SnapKV(1000, window_size=16)]
    assert first_that_keeps(demo, prompt, SETTINGS, full.token_ids, candidates).keeper == 1
    assert first_that_keeps(demo, prompt, SETTINGS, full.token_ids, candidates[:1]).keeper is None
    assert first_that_keeps(demo, prompt, SETTINGS, full.token_ids, []).keeper is None


@pytest.mark.parametrize("budget", [16, 100])
def test_a_hidden_question_is_read_from_what_was_kept(demo, prompt, budget):
    hidden, policy = prompt.hiding(QUESTION), KVzip(budget, window_size=8)
    full = answer(demo, hidden, FullCache(), SETTINGS)
    given = answer(demo, hidden, policy, SETTINGS)
    found = first_that_keeps(demo, hidden, SETTINGS, full.token_ids, [policy])
    assert not found.untold
    assert (found.keeper == 0) == (given.token_ids == full.token_ids)


def test_drawn_answers_are_not_told(demo, prompt):
    drawn = GenerationSettings(max_new_tokens=8, temperature=0.7)
    found = first_that_keeps(demo, prompt, drawn, [1, 2], [SnapKV(64, window_size=16)])
    assert found.keeper is None
    assert found.untold == "the answers are drawn, at temperature 0.7"


def test_an_answer_that_the_full_cache_does_not_repeat_tells_nothing(demo, prompt, full):
    other = [*full.token_ids[:2], 11, *full.token_ids[3:]]
    found = first_that_keeps(demo, prompt, SETTINGS, other, [FullCache()])
    assert found.keeper is None
    assert "to tell" in found.untold


def test_what_the_checkpoint_does_to_logits_counts(demo, prompt, full, monkeypatch):
    monkeypatch.setattr(demo.model.generation_config, "repetition_penalty", 1.8)
    penalised = answer(demo, prompt, FullCache(), SETTINGS)
    assert penalised.token_ids != full.token_ids
    found = first_that_keeps(demo, prompt, SETTINGS, penalised.token_ids, [FullCache()])
    assert found.keeper == 0


class Given(Prompt):
    """A prompt of random tokens, for a model without a tokenizer."""

    def token_ids(self, tokenizer):
        return random_ids(1, 60)


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2"])
@pytest.mark.parametrize("budget", [12, 56])
def test_layers_that_slide_over_a_window_are_as_they_are_behind_the_prompt(demo, family, budget):
    loaded = LoadedModel(
        model=tiny_model(family), tokenizer=demo.tokenizer, name=family, revision=None
    )
    prompt, policy = Given(text=""), SnapKV(budget, window_size=4)
    full = answer(loaded, prompt, FullCache(), SETTINGS)
    given = answer(loaded, prompt, policy, SETTINGS)
    found = first_that_keeps(loaded, prompt, SETTINGS, full.token_ids, [policy])
    assert not found.untold
    assert (found.keeper == 0) == (given.token_ids == full.token_ids)
