"""What to pass to vLLM so that it compresses prompts, and its OpenAI-compatible server."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import (
    DEFAULT,
    DEFAULT_BUDGET,
    MAX_KERNEL_SIZE,
    MAX_WINDOW_SIZE,
    format_bytes,
)
from snapkv_vllm.admission.compatibility import require_compatible
from snapkv_vllm.admission.limits import Limits, Sessions
from snapkv_vllm.admission.names import wrong
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.plugin import METRICS_VARIABLE, lock_users_folder, make_metrics_folder
from snapkv_vllm.versions import require_supported_version

PLUGIN_OPTIONS = ("worker_cls", "scheduler_cls", "additional_config", "logits_processors")
"""The arguments of vLLM through which the plugin works."""

SETTINGS_CHECK = "snapkv_vllm.middleware.SettingsCheck"
"""What to pass to vLLM's ``--middleware``."""

_NAME = "--served-model-name"
_CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"

_SHARE_OF_FREE = 4
"""A quarter: the weights and what else runs need the rest."""


def engine_args(
    *,
    budget: int = DEFAULT_BUDGET,
    policy: str = DEFAULT,
    parameters: Mapping[str, Any] | None = None,
    protect_first: int = 0,
    max_window_size: int = MAX_WINDOW_SIZE,
    max_kernel_size: int = MAX_KERNEL_SIZE,
    limits: Limits | None = None,
    sessions: Sessions | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Arguments for ``vllm.LLM(model, **engine_args(budget=1024))`` or `AsyncEngineArgs`.

    Args:
        budget: tokens kept per KV head and layer; 0 compresses only requests with
            ``extra_args={"snapkv_budget": ...}``.
        policy: "default", the largest votes as in `snapkv.default_policy`, though every layer keeps
            as many tokens; "across-layers", as there; "snapkv", "adakv", "streaming-llm" or "tova".
            All of them compress the prompt at its end.
        parameters: of the method, such as ``{"kernel_size": 13}``.
        protect_first: first tokens of every prompt that are kept.
        max_window_size: the largest window size, and the most voters, that a request may set.
        max_kernel_size: the largest kernel size that a request may set.
        limits: how many tokens a request may store while generating; by default all.
        sessions: settings of sessions whose history is kept; None for none.
        options: any other option of vLLM; its own of the same kind are kept.

    Raises:
        InvalidArgumentError: a value out of range, or an option that the plugin must set itself.
        MissingDependencyError: no vLLM, or one that is too old.
    """
    settings = ServingSettings(
        policy=policy,
        budget=budget,
        parameters=dict(parameters or {}),
        protect_first=protect_first,
        max_window_size=max_window_size,
        max_kernel_size=max_kernel_size,
        limits=limits or Limits(),
        sessions=sessions,
    )
    return {**options, **_plugin_arguments(settings, options)}


def _plugin_arguments(settings: ServingSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """`OWN` for these settings, with what the user gives for them."""
    require_supported_version()
    from snapkv_vllm.requests import check_name

    for taken in ("worker_cls", "scheduler_cls"):
        if given.get(taken) not in (None, "auto"):
            raise wrong(
                taken, "none, since snapkv brings its own", repr(given[taken]), "leave it out"
            )
    return {
        "worker_cls": "snapkv_vllm.worker.CompressingWorker",
        "scheduler_cls": "snapkv_vllm.scheduler.scheduler",
        "additional_config": {**(given.get("additional_config") or {}), **settings.to_config()},
        "logits_processors": [*(given.get("logits_processors") or ()), check_name(settings)],
    }


def command_line(
    model: str, settings: ServingSettings, options: Sequence[str], *, name: str
) -> str:
    """The shell command that starts the same server with ``vllm serve``.

    Args:
        model: what vLLM loads.
        settings: what to keep of prompts.
        options: any further ones of ``vllm serve``, passed on as they are.
        name: the model's name in requests, unless the options set it.

    Raises:
        InvalidArgumentError: an option that the line has already, of which vLLM takes the last.
        MissingDependencyError: no vLLM, or one that is too old.
    """
    for word in options:
        option = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if option.startswith("--") and option[2:].replace("-", "_") in PLUGIN_OPTIONS:
            line = "since vLLM would take it in place of the printed one"
            none = f"none with --print-command, {line}"
            raise wrong(option, none, "it", "leave it out, and join the two by hand")
    named = () if _NAME in options else (_NAME, name)
    own = [*_command_words(_plugin_arguments(settings, {})), "--middleware", SETTINGS_CHECK, *named]
    return shlex.join(["vllm", "serve", model, *own, *options])


def _command_words(options: Mapping[str, Any]) -> Iterator[str]:
    """Options of vLLM as words of its command line."""
    for name, value in options.items():
        yield "--" + name.replace("_", "-")
        if isinstance(value, list):
            yield from map(str, value)
        else:
            yield json.dumps(value) if isinstance(value, Mapping) else str(value)


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
        MissingDependencyError: no vLLM, or one that is too old.
    """
    require_supported_version()
    with lock_users_folder() if METRICS_VARIABLE in os.environ else make_metrics_folder():
        _run(model, settings, options, name or model)


def parse_options(model: str, options: Sequence[str]) -> tuple[Any, Any]:
    """vLLM's command ``serve`` and what it makes of such options, with our middleware."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="snapkv")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", model, *options])
    args.model = model
    args.middleware = [*args.middleware, SETTINGS_CHECK]
    return command, args


def _run(model: str, settings: ServingSettings, options: Sequence[str], name: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own command does
    command, args = parse_options(model, options)
    args.served_model_name = args.served_model_name or [name]
    _leave_memory_free(args, AsyncEngineArgs.gpu_memory_utilization)
    given = {option: getattr(args, option) for option in PLUGIN_OPTIONS}
    for option, value in _plugin_arguments(settings, given).items():
        setattr(args, option, value)
    try:
        command.validate(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except ValueError as error:  # vLLM's checks, pydantic's among them
        raise InvalidArgumentError(f"vllm: {error}") from error
    require_compatible(settings=settings, engine=config)
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
