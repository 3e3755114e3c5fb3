"""vLLM's model runners, for which a request may hold fewer tokens than it has seen."""

from typing import Any


def compress_in(runner: Any) -> None:
    """Lay the abilities of a `CompressingRunner` over a runner that a worker has made."""
    if runner.vllm_config.use_v2_model_runner:
        from snapkv_vllm.runners.second import CompressingSecondRunner

        CompressingSecondRunner.over(runner)
    else:
        from snapkv_vllm.runners.first import CompressingFirstRunner

        CompressingFirstRunner.over(runner)
