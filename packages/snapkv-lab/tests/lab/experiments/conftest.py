import pytest

from tests.lab.evaluate.tiny import save_tiny, tiny_loaded


@pytest.fixture(scope="session")
def tiny(demo):
    """The tiny model with room for long prompts."""
    return tiny_loaded(demo.tokenizer, positions=4096)


@pytest.fixture(scope="session")
def saved(demo, tmp_path_factory):
    """A folder with the tiny model, for tests that start processes."""
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), demo.tokenizer, positions=4096))
