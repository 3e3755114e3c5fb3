import pytest

from tests.lab.evaluate.tiny import tiny_loaded


@pytest.fixture(scope="session")
def tiny(demo):
    """An untrained model of two layers with the demo's tokenizer."""
    return tiny_loaded(demo.tokenizer)
