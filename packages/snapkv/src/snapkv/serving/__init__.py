"""Where the plugin for vLLM was in 0.1.0: now `snapkv_vllm`. Gone in 0.4.0."""

from typing import Any

from snapkv.moved import moved

_plugin = moved("snapkv.serving", "snapkv_vllm", "snapkv-vllm")


def __getattr__(name: str) -> Any:
    return getattr(_plugin.module("snapkv.serving"), name)
