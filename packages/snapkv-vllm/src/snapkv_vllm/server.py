"""The arguments with which vLLM compresses prompts, and vLLM's OpenAI-compatible server
with them.
"""

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
"""The options of vLLM through which the plugin works."""

SETTINGS_CHECK = "snapkv_vllm.middleware.SettingsCheck"
"""The value of vLLM's option ``--middleware``."""

_NAME = "--served-model-name"
_CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"

_SHARE_OF_FREE = 4
"""The cache takes a quarter of the free memory, because the weights and other programs need the
rest.
"""


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
    """Return the arguments with which vLLM compresses prompts, for ``vllm.LLM(model,
    **engine_args(budget=1024))`` or `AsyncEngineArgs`.

    The result is a new dictionary: `options`, in which the values of `PLUGIN_OPTIONS` are replaced.
    In `additional_config` and `logits_processors` the values of the user stay, and those of the
    plugin are added to them.

    Args:
        budget: tokens kept per KV head and layer; 0 compresses only requests with
            ``extra_args={"snapkv_budget": ...}``.
        policy: the method that compresses the prompt at its end. "default" takes the largest votes
            as `snapkv.default_policy` does, except that every layer keeps the same number of
            tokens; "across-layers" is `snapkv.default_policy` itself; the others are "snapkv",
            "adakv", "streaming-llm" and "tova".
        parameters: parameters of the method, such as ``{"kernel_size": 13}``.
        protect_first: how many first tokens of every prompt are kept.
        max_window_size: the longest window, and the most voters, that a request may set.
        max_kernel_size: the widest kernel that a request may set.
        limits: how many tokens a request may store while it generates; by default there is no
            limit.
        sessions: how much of the cache the histories of sessions may take; None disables sessions.
        options: any other arguments of vLLM, which are returned unchecked.

    Raises:
        InvalidArgumentError: a value is out of range, two settings contradict each other, or
            `options` has a `worker_cls` or `scheduler_cls` other than None and "auto".
        InvalidTypeError: a value has the wrong type.
        MissingDependencyError: vLLM is not installed, or its version is not supported.
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


def _plugin_arguments(settings: ServingSettings, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `PLUGIN_OPTIONS` for the given settings, combined with the values that
    the user has given.

    Args:
        settings: how prompts are compressed.
        options: the user's options of vLLM, by name. Names outside `PLUGIN_OPTIONS` have no effect.

    Returns:
        A new dict with exactly the keys `PLUGIN_OPTIONS`.

    Raises:
        RefusedError: the user has given another worker or scheduler.
        MissingDependencyError: vLLM is not installed, or its version is not supported.
    """
    require_supported_version()
    from snapkv_vllm.requests import check_name

    for option in ("worker_cls", "scheduler_cls"):
        if options.get(option) not in (None, "auto"):
            problem = (
                f"this option is set by snapkv and cannot be changed, but got {options[option]!r}"
            )
            raise wrong(option, problem, "Remove this option")
    return {
        "worker_cls": "snapkv_vllm.worker.CompressingWorker",
        "scheduler_cls": "snapkv_vllm.scheduler.scheduler",
        "additional_config": {**(options.get("additional_config") or {}), **settings.to_config()},
        "logits_processors": [*(options.get("logits_processors") or ()), check_name(settings)],
    }


def command_line(
    model: str, settings: ServingSettings, options: Sequence[str], *, name: str
) -> str:
    """Return the shell command with which ``vllm serve`` starts the same server.

    Args:
        model: the model that vLLM loads.
        settings: how prompts are compressed.
        options: further options of ``vllm serve``, which are passed on unchanged and are not
            checked otherwise.
        name: the name of the model in requests, unless `options` sets it.

    Raises:
        InvalidArgumentError: `options` has one of `PLUGIN_OPTIONS`, of which vLLM would use only
            the last value.
        MissingDependencyError: vLLM is not installed, or its version is not supported.
    """
    for word in options:
        option = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if option.startswith("--") and option[2:].replace("-", "_") in PLUGIN_OPTIONS:
            problem = "vLLM would use this value instead of the value that --print-command prints"
            raise wrong(option, problem, "Remove this option, and combine the two values by hand")
    named = () if _NAME in options else (_NAME, name)
    own = [*_command_words(_plugin_arguments(settings, {})), "--middleware", SETTINGS_CHECK, *named]
    return shlex.join(["vllm", "serve", model, *own, *options])


def _command_words(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line that sets the given options of vLLM: the name of each
    option, followed by its value. A list becomes one word for each entry, and a mapping one word of
    JSON.
    """
    for name, value in options.items():
        yield "--" + name.replace("_", "-")
        if isinstance(value, list):
            yield from map(str, value)
        else:
            yield json.dumps(value) if isinstance(value, Mapping) else str(value)


def serve(
    model: str, settings: ServingSettings, options: Sequence[str], *, name: str | None = None
) -> None:
    """Run ``vllm serve`` with compressed prompts in this process, and return when it has stopped.

    While it runs, the environment variables for the metrics of several processes are set. If the
    user has not set `METRICS_VARIABLE`, the metrics are in a temporary folder.

    Args:
        model: the model that vLLM loads, a folder or a hub id. An option cannot replace it.
        settings: how prompts are compressed.
        options: any options of ``vllm serve``, as on its command line.
        name: the name of the model in requests, unless `options` sets it; by default `model`.

    Raises:
        SystemExit: vLLM's parser does not know an option or cannot read its value. It has then
            written the reason to standard error.
        InvalidArgumentError: vLLM refuses the values of the options or cannot read the file of its
            option ``--config``, the options name another worker or scheduler, metrics cannot be
            written, or another server writes them to the same folder.
        UnsupportedModelError: the engine cannot compress prompts with these options.
        MissingDependencyError: vLLM is not installed, or its version is not supported.
    """
    require_supported_version()
    with lock_users_folder() if METRICS_VARIABLE in os.environ else make_metrics_folder():
        _run(model, settings, options, name or model)


def parse_options(model: str, options: Sequence[str]) -> tuple[Any, Any]:
    """Parse the options of ``vllm serve``, and return vLLM's command ``serve`` and the namespace of
    the parsed options. The middleware of this plugin is added to them. vLLM must be installed.

    Args:
        model: the model that vLLM loads; an option cannot replace it.
        options: further options, as on the command line.

    Raises:
        SystemExit: an option is unknown, or its value cannot be read. vLLM's parser has then
            written the reason to standard error.
        InvalidArgumentError: the file of vLLM's option ``--config`` cannot be read, or is no YAML
            file.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="snapkv")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        args = parser.parse_args(["serve", model, *options])
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"config: {error}") from error
    args.model = model
    args.middleware = [*args.middleware, SETTINGS_CHECK]
    return command, args


def _run(model: str, settings: ServingSettings, options: Sequence[str], name: str) -> None:
    """Start the server in this process, and return when it has stopped.

    The environment variable VLLM_WORKER_MULTIPROC_METHOD is set, unless the user has set it.

    Raises:
        SystemExit: vLLM's parser does not know an option or cannot read its value.
        InvalidArgumentError: vLLM refuses the values of the options, or they name another worker or
            scheduler.
        UnsupportedModelError: the engine cannot compress prompts with these options.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own command does
    command, args = parse_options(model, options)
    args.served_model_name = args.served_model_name or [name]
    _leave_memory_free(args, AsyncEngineArgs.gpu_memory_utilization)
    values = {option: getattr(args, option) for option in PLUGIN_OPTIONS}
    for option, value in _plugin_arguments(settings, values).items():
        setattr(args, option, value)
    try:
        command.validate(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except ValueError as error:  # also the errors of pydantic
        raise InvalidArgumentError(f"vllm: {error}") from error
    require_compatible(settings=settings, engine=config)
    command.cmd(args)


def _leave_memory_free(args: Any, default_share: float) -> None:
    """Set `args.kv_cache_memory_bytes` so that the caches of all processes together take only a
    quarter of the free memory.

    This is done only if the machine has no GPU and the user has set neither this size nor vLLM's
    share of the memory, as an option or by an environment variable. vLLM itself would take
    `default_share` of the whole memory, and would not start if less than that is free. The size is
    logged.

    Args:
        args: vLLM's options, changed in place.
        default_share: the value of ``--gpu-memory-utilization`` that counts as not set.
    """
    import psutil
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    is_set = args.kv_cache_memory_bytes or args.gpu_memory_utilization != default_share
    if is_set or _CPU_SPACE in os.environ or not current_platform.is_cpu():
        return
    processes = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
    share = psutil.virtual_memory().available // (_SHARE_OF_FREE * processes)
    args.kv_cache_memory_bytes = share
    init_logger("vllm.snapkv").info(
        "The cache takes %s of the free memory; set --kv-cache-memory-bytes to change it",
        format_bytes(share),
    )
