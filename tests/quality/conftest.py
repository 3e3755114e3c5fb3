import pytest

from snapkv.evaluate.haystack import load_haystack


@pytest.fixture(scope="session")
def demo():
    from snapkv.models import load

    return load("demo", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def haystack():
    return load_haystack()
