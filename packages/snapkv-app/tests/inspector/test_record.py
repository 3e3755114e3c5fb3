"""The page shows the kept tokens and answers of real caches."""

import itertools
from typing import ClassVar

import pytest
import torch

from snapkv import (
    H2O,
    AdaKV,
    CompressedCache,
    FastGen,
    FullCache,
    KeyDiff,
    PromptThenDecode,
    PyramidKV,
    SnapKV,
    StreamingLLM,
)
from snapkv.cache.shown import token_texts
from snapkv_app.answering import answer
from snapkv_app.inspector import inspect_prompt
from snapkv_app.inspector.record import CHOSEN, prompt_texts
from snapkv_app.prompts import Prompt, question_prompt
from snapkv_app.settings import GenerationSettings
from tests.families import kept_of

FILLER = "The garden is quiet, the path is long and the wall is old. "
FACT = "The key to the garden gate is under the blue stone. "
DOCUMENT = FILLER * 10 + FACT + FILLER * 10
QUESTION = "Where is the key to the garden gate?"
POLICIES = [
    SnapKV(96, window_size=16),
    PyramidKV(96, window_size=16),
    AdaKV(SnapKV(96, window_size=16)),
    KeyDiff(96),
    H2O(96),
    StreamingLLM(96),
    FastGen(0.9),
    PromptThenDecode(prompt=SnapKV(96, window_size=16), decode=H2O(128)),
    FullCache(),
]


@pytest.fixture(scope="module")
def prompt(demo):
    start = "The key to the garden gate is under the"
    return question_prompt(demo.tokenizer, DOCUMENT, QUESTION, answer_start=start)


@pytest.fixture(scope="module")
def every_method(tiny, prompt):
    policies = [(policy.name, policy) for policy in POLICIES]
    return inspect_prompt(tiny, prompt, policies, GenerationSettings(max_new_tokens=1))


@pytest.fixture(scope="module")
def inspection(demo, prompt):
    policies = [(policy.name, policy) for policy in (POLICIES[0], POLICIES[-1])]
    settings = GenerationSettings(max_new_tokens=3)
    budgets = [(str(tokens), SnapKV(tokens, window_size=16)) for tokens in (20, 200)]
    return inspect_prompt(demo, prompt, policies, settings, budgets=budgets)


@pytest.mark.parametrize("number", range(len(POLICIES)), ids=[p.name for p in POLICIES])
def test_kept_tokens_equal_those_of_a_real_cache(tiny, prompt, every_method, number):
    ids = prompt.token_ids(tiny.tokenizer)
    cache = CompressedCache(tiny.model, POLICIES[number].with_tokenizer(tiny.tokenizer))
    cache.expect_tokens(ids)
    with torch.inference_mode():
        tiny.model(ids, past_key_values=cache, logits_to_keep=1)
    shown, counts = every_method.methods[number].chosen, [0] * ids.shape[1]
    heads = [head for (row,) in kept_of(cache) for head in row]
    for position in itertools.chain(*heads):
        counts[position] += position >= 0
    assert shown.counts.tolist() == counts
    assert shown.heads == len(heads)


def test_slider_has_every_answer_in_the_order_of_memory(demo, prompt, inspection):
    method, *others = inspection.methods
    assert [record.label for record in method.budgets] == ["20", CHOSEN, "200"]
    assert all(len(other.budgets) == 1 for other in others)
    for record, tokens in zip(method.budgets, (20, 96, 200), strict=True):
        settings = GenerationSettings(max_new_tokens=3)
        alone = answer(demo, prompt, SnapKV(tokens, window_size=16), settings)
        assert record.answer.text == alone.text
        assert record.counts.sum() == tokens * record.heads
    stops = inspection.page({}).methods[0].stops
    assert [stop.answer["same"] for stop in stops] == [False, True, True]
    assert stops[1].sentences[0].startswith("The cache keeps 96 of ")
    assert stops[1].sentences[1].endswith("full cache's, as far as both go: 3 tokens.")
    assert inspection.page({}).methods[0].chosen == 1


def test_answers_equal_those_of_the_caches(inspection, every_method):
    assert inspection.full.text.endswith("blue stone.")
    labels = [method.label for method in every_method.methods]
    assert labels == [policy.name for policy in POLICIES]
    assert inspection.methods[-1].chosen.answer.text == inspection.full.text


def test_strongest_vote_of_a_voter_is_for_the_place_of_the_answer(inspection, every_method):
    ballots = {method.label: method.ballot for method in every_method.methods}
    assert {label for label, ballot in ballots.items() if ballot is None} == {
        *("keydiff", "h2o", "streaming-llm", "fastgen", "full")
    }
    near = inspection.pieces[inspection.methods[0].ballot.strongest - 8 :][:16]
    assert "gate is under the blue" in "".join(near)


def test_prompt_is_read_one_time_for_all_methods_and_budgets(tiny, prompt, monkeypatch):
    read = []
    forward = type(tiny.model.model).forward

    def counted(self, input_ids=None, **kwargs):
        read.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(tiny.model.model), "forward", counted)
    policies = [("snapkv", SnapKV(96, window_size=16)), ("h2o", H2O(96))]
    budgets = [("20", SnapKV(20, window_size=16))]
    inspect_prompt(tiny, prompt, policies, GenerationSettings(max_new_tokens=2), budgets=budgets)
    assert [tokens for tokens in read if tokens > 1] == [prompt.token_ids(tiny.tokenizer).shape[1]]


def test_pieces_add_up_to_the_text(demo):
    text = "Ünïcode 😀 and <script>alert(1)</script>\n\tnäxt 钥匙"
    prompt = Prompt(text=text)
    pieces = prompt_texts(demo.tokenizer, prompt)
    assert "".join(pieces) == text
    assert len(pieces) == prompt.token_ids(demo.tokenizer).shape[1]


def test_tokenizer_without_offsets_decodes_token_by_token():
    class Slow:
        is_fast = False
        chat_template = unk_token_id = None
        added_tokens_decoder: ClassVar = {}

        def __call__(self, text, **options):
            del text, options
            return {"input_ids": [1, 2]}

        def decode(self, ids, **options):
            del options
            return " ".join(f"<{number}>" for number in ids)

    assert prompt_texts(Slow(), Prompt(text="ab")) == ["<1>", " <2>"]


@pytest.mark.parametrize("text", ["Ünïcode 😀 and\n\tnäxt 钥匙", " a  b .", "😀😀"])
def test_texts_of_tokens_add_up_to_the_decoded_text(demo, text):
    ids = demo.tokenizer(text)["input_ids"]
    texts = token_texts(demo.tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_incomplete_last_character_is_shown_as_the_tokenizer_does(demo):
    ids = demo.tokenizer("钥匙")["input_ids"][:-1]
    assert "".join(token_texts(demo.tokenizer, ids)) == demo.tokenizer.decode(ids)
