"""What answers are tried on: a prompt, and a tiny model whose noise is the same every time."""

import pytest

from snapkv.app.prompts import question_prompt
from tests.lab.evaluate.tiny import tiny_loaded

DOCUMENT = "The gate opens at nine. The key is under the blue stone. " * 12


@pytest.fixture(scope="session")
def tiny(demo):
    return tiny_loaded(demo.tokenizer)


@pytest.fixture(scope="session")
def prompt(demo):
    return question_prompt(
        demo.tokenizer, DOCUMENT, "Where is the key?", answer_start="The key is under the"
    )
