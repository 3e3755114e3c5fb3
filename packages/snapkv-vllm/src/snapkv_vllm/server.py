"""vLLM's own OpenAI-compatible server, with compressed prompts."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import format_bytes
from snapkv_vllm.engine import OWN, arguments
from snapkv_vllm.lifetime import METRICS, metrics_folder
from snapkv_vllm.settings import ServingSettings
from snapkv_vllm.versions import require_supported_version

_CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"

_SHARE_OF_FREE = 4
"""A quarter: the weights and what else runs need the rest."""


def serve(
    model: str, settings: ServingSettings, options: Sequence[str], *, name: str | None = None
) -> None:
    """Run ``vllm serve`` until it is stopped.

    Args:
        model: what vLLM loads: a folder or a hub id.
        settings: what to keep of prompts.
        options: any options of ``vllm serve``, as on its command line.
        name: what the model is called in requests, unless the options say it; `model` by default.

    Raises:
        InvalidArgumentError: an option that vLLM refuses.
        UnsupportedModelError: something that prompts cannot be compressed with.
        MissingDependencyError: no vLLM, or one of another version.
    """
    require_supported_version()
    with contextlib.nullcontext() if METRICS in os.environ else metrics_folder():
        _run(model, settings, options, name or model)


def _run(model: str, settings: ServingSettings, options: Sequence[str], name: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from snapkv_vllm.middleware import NAME as SETTINGS_CHECK
    from snapkv_vllm.refusals import ONE_SERVER, require_supported

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="snapkv")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", model, *options])
    args.model = model
    args.served_model_name = args.served_model_name or [name]
    args.middleware = [*args.middleware, SETTINGS_CHECK]
    if settings.sharing is not None and (args.api_server_count or 1) > 1:
        raise InvalidArgumentError(
            f"share: expected one API server, got --api-server-count {args.api_server_count}: "
            f"{ONE_SERVER}"
        )
    _leave_memory_free(args, AsyncEngineArgs.gpu_memory_utilization)
    given = {option: getattr(args, option) for option in OWN}
    for option, value in arguments(settings, given).items():
        setattr(args, option, value)
    try:
        command.validate(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except ValueError as error:  # vLLM's checks, pydantic's among them
        raise InvalidArgumentError(f"vllm: {error}") from error
    require_supported(config)
    command.cmd(args)


def _leave_memory_free(args: Any, default_share: float) -> None:
    """On a machine without a GPU, let the cache take a part of what is free, unless told otherwise.

    vLLM takes `default_share` of all memory that is there, and does not start where less is free.
    """
    import psutil
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    told = args.kv_cache_memory_bytes or args.gpu_memory_utilization != default_share
    if told or _CPU_SPACE in os.environ or not current_platform.is_cpu():
        return
    processes = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
    share = psutil.virtual_memory().available // (_SHARE_OF_FREE * processes)
    args.kv_cache_memory_bytes = share
    init_logger("vllm.snapkv").info(
        "The cache gets %s of the free memory; --kv-cache-memory-bytes says otherwise",
        format_bytes(share),
    )
