"""vLLM over the demo model in this process, for the experiments with it.

Import it before vLLM: one engine after the other, threads as the system gives them. Needs `make
.venv-vllm/.installed`, whose Python runs these experiments.
"""

import gc
import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from snapkv.app.models import LoadedModel, place_of  # behind the environment
from snapkv_lab.experiments.environment import describe_environment
from snapkv_vllm.versions import installed


class Engine:
    """vLLM, stock or with compressed prompts.

    Args:
        options: of `vllm.LLM`.
    """

    def __init__(self, **options: Any) -> None:
        from vllm import LLM

        settings = {"enforce_eager": True, "disable_log_stats": True} | options
        self.llm = LLM(place_of("demo"), **settings)
        self.core = self.llm.llm_engine.engine_core.engine_core

    @property
    def pool(self) -> Any:
        """The blocks."""
        return self.core.scheduler.kv_cache_manager.block_pool

    def close(self) -> None:
        """Give the memory back."""
        self.core.shutdown()
        del self.llm, self.core
        gc.collect()


def measured_on(loaded: LoadedModel, **model: Any) -> dict[str, Any]:
    """What rows say of model and machine."""
    return {
        "model": loaded.description() | {"attn_implementation": "vLLM CPU_ATTN"} | model,
        "environment": describe_environment() | {"vllm": installed()},
    }
