"""A document and a prompt with a question about it."""

import pytest

from snapkv_app.prompts import question_prompt

DOCUMENT = "The gate opens at nine. The key is under the blue stone. " * 12


@pytest.fixture(scope="session")
def prompt(demo):
    return question_prompt(
        demo.tokenizer, DOCUMENT, "Where is the key?", answer_start="The key is under the"
    )
