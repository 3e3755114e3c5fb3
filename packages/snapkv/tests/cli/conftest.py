"""Running the command line inside the test's process, on the session's demo model."""

from dataclasses import dataclass

import pytest

from snapkv.cli.app import run
from tests.lab.evaluate.tiny import tiny_loaded

DOCUMENT = "The gate opens at nine. The key is under the blue stone. " * 12


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def snapkv(capsys):
    """Call it with arguments; it runs the command and captures its output."""

    def call(*arguments):
        status = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Finished(status=status, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def demo_only(monkeypatch, demo):
    """`load` gives the session's demo model; returns the keyword arguments of each call."""
    calls = []

    def load(**options):
        calls.append(options)
        return demo

    monkeypatch.setattr("snapkv.cli.loading.load", load)
    return calls


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(DOCUMENT)
    return path


@pytest.fixture(scope="module")
def tiny(demo):
    return tiny_loaded(demo.tokenizer)


@pytest.fixture
def tiny_only(monkeypatch, tiny):
    """`load` gives the tiny model; returns the keyword arguments of each call."""
    calls = []

    def load(**options):
        calls.append(options)
        return tiny

    monkeypatch.setattr("snapkv.cli.loading.load", load)
    return calls


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path
