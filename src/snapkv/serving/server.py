"""vLLM's own OpenAI-compatible server, with compressed prompts."""

import os
import tempfile
from collections.abc import Sequence

from snapkv.errors import InvalidArgumentError
from snapkv.serving.engine import OWN, arguments
from snapkv.serving.settings import ServingSettings
from snapkv.serving.versions import require_supported_version

_METRICS = "PROMETHEUS_MULTIPROC_DIR"


def serve(model: str, settings: ServingSettings, options: Sequence[str]) -> None:
    """Run ``vllm serve`` until it is stopped.

    Args:
        model: what vLLM loads: a folder or a hub id.
        settings: what to keep of prompts.
        options: any options of ``vllm serve``, as on its command line.

    Raises:
        InvalidArgumentError: an option that vLLM refuses.
        UnsupportedModelError: something that prompts cannot be compressed with.
        MissingDependencyError: no vLLM, or one of another version.
    """
    require_supported_version()
    with tempfile.TemporaryDirectory(prefix="snapkv-metrics-") as folder:
        # Counts of the engine's process reach /metrics through files; chosen before the import.
        os.environ.setdefault(_METRICS, folder)
        _run(model, settings, options)


def _run(model: str, settings: ServingSettings, options: Sequence[str]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from snapkv.serving.refusals import require_supported

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="snapkv")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", model, *options])
    args.model = model
    for name, value in arguments(settings, {name: getattr(args, name) for name in OWN}).items():
        setattr(args, name, value)
    try:
        command.validate(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except ValueError as error:  # vLLM's checks, pydantic's among them
        raise InvalidArgumentError(f"vllm: {error}") from error
    require_supported(config)
    command.cmd(args)
