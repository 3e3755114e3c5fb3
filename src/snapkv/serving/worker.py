"""vLLM's workers, with a runner that compresses prompts; the class fits the machine."""

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from snapkv.serving.requests import without_checks
from snapkv.serving.runners import compress_in

if TYPE_CHECKING or current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class CompressingWorker(PlatformWorker):
    """A worker whose runner carries out the orders of the compressing scheduler."""

    def init_device(self) -> None:
        """Make vLLM's own runner, and lay ours over it."""
        config = self.model_config
        config.logits_processors = without_checks(config.logits_processors)
        super().init_device()
        compress_in(self.model_runner)
