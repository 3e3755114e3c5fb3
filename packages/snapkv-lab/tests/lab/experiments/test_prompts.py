"""A prompt that is read once and compressed many times."""

import re

import pytest
import torch

from snapkv import H2O, CompressedCache, FastGen, FullCache, SnapKV
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.methods import SETTINGS
from snapkv_lab.experiments.prompts import make_documents, quoted_document, read_prompt
from snapkv_lab.experiments.texts import TextQuestion, score_answer

POLICIES = [
    FullCache(),
    SnapKV(128, window_size=32, kernel_size=1),
    SnapKV(96, window_size=16, kernel_size=5, pooling="avg", group_reduce="none"),
    *(way.policy(96) for way in SETTINGS["visible"].ways),
    FastGen(0.1),
]
TOKENS = 256


def asked(document):
    """Return the question of a document that is read completely."""
    answer = document.answer_ids
    return TextQuestion(group="", answer_ids=answer, parts=[range(len(answer))])


@pytest.fixture(scope="module")
def document(demo):
    (document,) = make_documents(demo.tokenizer, prompt_tokens=TOKENS)
    return document


@pytest.fixture(scope="module")
def prompt(tiny, document):
    return read_prompt(tiny.model, document.prompt_ids, recorded_queries=TOKENS)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_compressed_copy_equals_a_compressed_prefill_bit_for_bit(policy, tiny, document, prompt):
    policy = policy.with_tokenizer(tiny.tokenizer)
    before = [layer.keys.clone() for layer in prompt.layers]
    copy, real = prompt.compressed(policy), CompressedCache(tiny.model, policy)
    ids = torch.tensor([document.prompt_ids])
    real.expect_tokens(ids)
    with torch.inference_mode():
        logits = tiny.model(ids, past_key_values=real, logits_to_keep=1).logits
    assert torch.equal(logits, prompt.last_logits)
    assert copy.report() == real.report()
    for index, (mine, theirs) in enumerate(zip(copy.layers, real.layers, strict=True)):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
        assert torch.equal(copy.kept_positions(index), real.kept_positions(index))
    assert score_answer(prompt, copy, asked(document)) == score_answer(
        prompt, real, asked(document)
    )
    assert all(map(torch.equal, before, [layer.keys for layer in prompt.layers]))


def test_a_method_that_needs_more_queries_than_were_recorded_is_refused(tiny, document):
    prompt = read_prompt(tiny.model, document.prompt_ids)
    with pytest.raises(ValueError, match="expected 256 recorded queries"):
        prompt.compressed(H2O(96))


def test_a_document_has_its_length_the_needle_and_digits_of_one_token_each(demo, document):
    assert len(document.prompt_ids) == TOKENS
    text = demo.tokenizer.decode(document.prompt_ids)
    city, number = re.search(r"Special magic number for (\w+) is (\d{4})\.", text).groups()
    question = f"\n\nQuestion: What is the special magic number for {city}?"
    assert text.endswith(f"{question}\nAnswer: The special magic number for {city} is")
    digits = [demo.tokenizer.decode([token]) for token in document.answer_ids]
    assert digits == [" ", *number]


def test_questions_quote_the_document_at_ten_depths(demo):
    document = quoted_document(demo.tokenizer, load_haystack().text, tokens=1024)
    text = demo.tokenizer.decode(document.ids)
    assert len(document.ids) == 1024
    for place, quote in enumerate(document.quotes):
        start = demo.tokenizer.decode(quote.question_ids).partition('"')[2]
        assert text.count(start + demo.tokenizer.decode(quote.answer_ids)) == 1
        assert abs(quote.depth - (place + 0.5) / 10) < 0.1
        assert abs(text.index(start) / len(text) - quote.depth) < 0.01
