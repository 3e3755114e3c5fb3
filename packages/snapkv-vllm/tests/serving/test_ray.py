"""Settings for the replicas of Ray Serve, tested without Ray."""

import sys

import pytest

from snapkv.errors import MissingDependencyError
from snapkv_vllm import ray


def test_variables_of_vllm_are_passed_on_without_secrets(monkeypatch):
    for name in ("VLLM_LOGGING_LEVEL", "HF_HOME", "VLLM_API_KEY", "HF_TOKEN", "PATH"):
        monkeypatch.setenv(name, "given")
    sent = ray.runtime_env()["env_vars"]
    assert sent.pop("PROMETHEUS_MULTIPROC_DIR")
    assert {"VLLM_LOGGING_LEVEL": "given", "HF_HOME": "given"}.items() <= sent.items()
    assert not {"VLLM_API_KEY", "HF_TOKEN", "PATH"} & set(sent)


def test_users_environment_takes_precedence(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    given = {"env_vars": {"VLLM_LOGGING_LEVEL": "ERROR", "MINE": "1"}, "pip": ["einops"]}
    options = ray._add_environment({"num_gpus": 1, "runtime_env": given})
    assert options["num_gpus"] == 1
    assert options["runtime_env"]["pip"] == ["einops"]
    sent = options["runtime_env"]["env_vars"]
    assert sent["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert sent["MINE"] == "1"
    assert "PROMETHEUS_MULTIPROC_DIR" in sent
    assert given["env_vars"] == {"VLLM_LOGGING_LEVEL": "ERROR", "MINE": "1"}


def test_missing_ray_is_reported_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'ray\[serve\]'"):
        ray.application("a-model")
