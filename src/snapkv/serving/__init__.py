"""Compressed prompts in vLLM, as a plugin; vLLM is imported when an engine is asked for."""

from snapkv.serving.engine import engine_args
from snapkv.serving.limits import Limits
from snapkv.serving.settings import ServingSettings

__all__ = ["Limits", "ServingSettings", "engine_args"]
