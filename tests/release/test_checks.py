"""The checks of a release can fail."""

import zipfile

import pytest

from tests.release import __main__ as release
from tests.release import checks, environments
from tests.release.environments import NotReleasableError, build


class Fake:
    """An environment that prints what it is told to."""

    def __init__(self, folder, **printed):
        self.folder, self.printed = folder, printed

    def run(self, program, *arguments):
        return self.printed[arguments[0].strip("-") if program == "snapkv" else program]


def test_a_command_line_that_is_slow_or_imports_too_much_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    right = Fake(tmp_path, help="ask", python="0.1 snapkv.cli.app")
    assert checks.require_command_line(right) == 0.1
    for wrong, words in [
        ({"help": "ask", "python": "0.4 snapkv.cli.app"}, "at most 0.3 s, got 0.40 s"),
        (
            {"help": "ask", "python": "0.1 numpy snapkv.cli.app snapkv_lab torch"},
            "none of numpy, snapkv_lab, torch",
        ),
        ({"help": "", "python": "0.1 snapkv.cli.app"}, "expected the command ask"),
    ]:
        with pytest.raises(NotReleasableError, match=words):
            checks.require_command_line(Fake(tmp_path, **wrong))
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    slow = Fake(tmp_path, help="ask", python="0.4 snapkv.cli.app")
    assert checks.require_command_line(slow) == 0.4


def test_a_wrong_answer_and_an_early_laboratory_are_named(tmp_path):
    checks.require_library(Fake(tmp_path, python="snapkv", ask="behind the red door"))
    with pytest.raises(NotReleasableError, match="expected the red door, got 'green'"):
        checks.require_library(Fake(tmp_path, python="snapkv", ask="green"))
    with pytest.raises(NotReleasableError, match="expected no laboratory"):
        checks.require_library(Fake(tmp_path, python="snapkv_lab", ask="red door"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"snapkv/a": b"x" * 2_600_000}, "at most 2,500,000 bytes"),
        ({"snapkv/a": b""}, r"a file snapkv/py.typed"),
        ({"snapkv/py.typed": b"", "METADATA": b""}, "a file licenses/LICENSE"),
    ],
    ids=["large", "untyped", "unlicensed"],
)
def test_a_wheel_that_is_too_large_or_lacks_a_file_is_named(tmp_path, monkeypatch, files, words):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    (tmp_path / "a.tar.gz").touch()
    monkeypatch.setattr(environments, "run", lambda *_: "")
    with pytest.raises(NotReleasableError, match=words):
        build(tmp_path)


def test_a_command_that_fails_says_how(tmp_path):
    with pytest.raises(NotReleasableError, match=r"false: status 1"):
        environments.run(["false"], tmp_path)


def test_a_check_that_does_not_hold_is_a_failure_with_its_reason(tmp_path, monkeypatch, capsys):
    def check(*_):
        raise NotReleasableError("wheel: expected a file, got none")

    monkeypatch.setattr(release, "check", check)
    outcome = release.outcome_in(Fake(tmp_path), tmp_path, tmp_path, [])
    assert outcome == "failed: wheel: expected a file, got none"
    assert "wheel: expected a file, got none" in capsys.readouterr().err
    monkeypatch.setattr(release, "check", lambda *_: None)
    assert release.outcome_in(Fake(tmp_path), tmp_path, tmp_path, []) == "passed"
