"""Running the command line inside the test's process, on a tiny model or the session's demo."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from snapkv.cache.report import CacheReport
from snapkv.errors import ModelNotFoundError
from snapkv_app.answering import Answer
from snapkv_app.cli.app import run
from tests.app.conftest import DOCUMENT
from tests.lab.evaluate.tiny import tiny_loaded


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str


def run_python(*arguments, **options):
    """What becomes of a process of its own, whose output is buffered as that of most users is."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {**pipes, "timeout": 120, "env": env} | options
    return subprocess.run([sys.executable, *arguments], encoding="utf-8", **options)


def made_answer(text, cache, *, policy, **told):
    """An answer that no model has given, from a cache that reports these numbers."""
    report = CacheReport(policy=policy["name"], **cache)
    usual = {"finish_reason": "stop", "new_tokens": 10, "first_token_ms": 1.0, "token_ms": 1.0}
    return Answer(**usual | told, text=text, policy=policy, cache=report)


@pytest.fixture
def snapkv(capsys):
    """Call it with arguments; it runs the command and captures its output."""

    def call(*arguments):
        status = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Finished(status=status, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def refused(snapkv):
    """Call it with arguments that it refuses; returns the one line that says why."""

    def call(*arguments):
        done = snapkv(*arguments)
        assert done.status == 2, done.err
        if "--json" in arguments:
            assert [*json.loads(done.out)] == ["error"]
        else:
            assert done.out == ""
        assert done.err.startswith("snapkv: error: ")
        assert done.err.count("\n") == 1
        return done.err

    return call


def given(monkeypatch, loaded):
    """Make `load` give a model; returns the keyword arguments of each call."""
    calls = []

    def load(**options):
        calls.append(options)
        return loaded

    monkeypatch.setattr("snapkv_app.cli.loading.load", load)
    monkeypatch.setattr("snapkv_app.model_places.local_place", lambda *_, **__: None)  # any name
    return calls


@pytest.fixture
def demo_only(monkeypatch, demo):
    return given(monkeypatch, demo)


@pytest.fixture(scope="module")
def tiny(demo):
    return tiny_loaded(demo.tokenizer, positions=1024)


@pytest.fixture
def tiny_only(monkeypatch, tiny):
    return given(monkeypatch, tiny)


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """A command ends, having begun, where a model would be loaded."""

    def load(**_):
        raise ModelNotFoundError("the command has begun")

    monkeypatch.setattr("snapkv_app.cli.loading.load", load)


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(DOCUMENT)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path
