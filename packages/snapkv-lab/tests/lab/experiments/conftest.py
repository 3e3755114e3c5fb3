import pytest

from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.magic_number import Document
from tests.families import random_ids


@pytest.fixture(scope="session")
def demo():
    from snapkv.app.models import load

    return load("demo", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def haystack():
    return load_haystack()


@pytest.fixture(scope="session")
def random_document():
    """A document of 150 tokens for models without words."""
    return Document(
        prompt_ids=random_ids(1, 150)[0].tolist(),
        question_ids=[],
        answer_ids=[5, 6, 7],
        city="",
        number=0,
        depth=0.5,
    )
