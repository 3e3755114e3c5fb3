import pytest

from tests.lab.evaluate.tiny import tiny_loaded


@pytest.fixture(scope="session")
def tiny(demo):
    """The same with room for long prompts."""
    return tiny_loaded(demo.tokenizer, positions=4096)


@pytest.fixture(scope="session")
def saved(tiny, tmp_path_factory):
    """The same in a folder, for what starts processes."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return str(folder)
