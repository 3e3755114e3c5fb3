"""Compressed prompts in vLLM, as a plugin; vLLM is imported when an engine is asked for."""

from snapkv.serving.engine import engine_args
from snapkv.serving.settings import ServingSettings

__all__ = ["ServingSettings", "engine_args"]
