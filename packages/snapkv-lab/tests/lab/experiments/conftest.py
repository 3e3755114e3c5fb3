import pytest

from tests.lab.evaluate.tiny import save_tiny, tiny_loaded


@pytest.fixture(scope="session")
def tiny(demo):
    """The same with room for long prompts."""
    return tiny_loaded(demo.tokenizer, positions=4096)


@pytest.fixture(scope="session")
def saved(demo, tmp_path_factory):
    """The same in a folder, for what starts processes."""
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), demo.tokenizer, positions=4096))
