"""A worker of vLLM whose runner compresses prompts; its base class depends on the platform."""

from typing import TYPE_CHECKING

from snapkv_vllm.versions import require_supported_version

require_supported_version()

from vllm.platforms import current_platform

from snapkv_vllm.plugin import end_with_parent
from snapkv_vllm.requests import remove_checks
from snapkv_vllm.runners import extend_runner

if TYPE_CHECKING or current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class CompressingWorker(PlatformWorker):
    """A worker of vLLM whose runner carries out the orders of the compressing scheduler."""

    def init_device(self) -> None:
        """Initialize the device as vLLM does, and then extend the runner that was built for it.

        Raises:
            UnsupportedModelError: the engine cannot serve with the settings of the server.
        """
        end_with_parent()
        config = self.model_config
        config.logits_processors = remove_checks(config.logits_processors)
        super().init_device()
        extend_runner(self.model_runner)
