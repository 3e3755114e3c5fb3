"""A prompt that is read once and compressed many times."""

import re

import pytest

from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.prompts import make_documents, quoted_document

TOKENS = 256


@pytest.fixture(scope="module")
def document(demo):
    (document,) = make_documents(demo.tokenizer, prompt_tokens=TOKENS)
    return document


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
