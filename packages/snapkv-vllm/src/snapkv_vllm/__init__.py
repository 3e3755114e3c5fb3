"""Compressed prompts in vLLM, as a plugin; vLLM is imported when an engine is asked for."""

from snapkv_vllm.limits import Limits
from snapkv_vllm.server import engine_args
from snapkv_vllm.settings import ServingSettings

__all__ = ["Limits", "ServingSettings", "engine_args"]

__version__ = "0.3.0"
