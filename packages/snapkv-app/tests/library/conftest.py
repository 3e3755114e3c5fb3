"""Documents short enough for the tiny model."""

import pytest

from snapkv_app import Library

TEXTS = {
    "lease": "The tenant may terminate the lease with three months' notice.\nRent is due in May.",
    "loan": "The bank lends forty thousand crowns.\nInterest is four percent a year.",
    "garden": "Roses are cut in March.\nTomatoes want sun, and water in the morning.",
}


@pytest.fixture
def notices():
    return []


@pytest.fixture
def library(tmp_path, tiny, notices):
    """Three documents, kept whole."""
    made = Library(tmp_path / "library", on_notice=notices.append)
    made.add(tiny.model, tiny.tokenizer, TEXTS.items(), bits="none")
    return made
