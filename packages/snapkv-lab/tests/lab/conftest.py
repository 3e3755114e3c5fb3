import pytest

from tests.lab.evaluate.tiny import tiny_loaded


@pytest.fixture(scope="session")
def tiny(demo):
    """A model of two layers that has seen nothing, with the demo's tokenizer."""
    return tiny_loaded(demo.tokenizer)
