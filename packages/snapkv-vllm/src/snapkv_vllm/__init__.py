"""The plugin that compresses prompts in vLLM. It imports vLLM only when an engine or a server is
built.
"""

from snapkv_vllm.admission.limits import Limits, Sessions
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.server import engine_args

__all__ = ["Limits", "ServingSettings", "Sessions", "engine_args"]

__version__ = "0.4.0"
