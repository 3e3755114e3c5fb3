"""vLLM's OpenAI-compatible server with compressed prompts, as a Ray Serve application.

Ray is imported only when an application is built.
"""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from snapkv.errors import MissingDependencyError
from snapkv.validation import nearest
from snapkv_vllm.admission.names import wrong
from snapkv_vllm.plugin import METRICS_VARIABLE, make_metrics_folder
from snapkv_vllm.server import engine_args, parse_options

_PREFIXES = ("VLLM_", "HF_")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def runtime_env() -> dict[str, Any]:
    """Return the environment that Ray must give to actors that run an engine, as a dictionary for
    Ray's `runtime_env`. `application` sets it itself.

    For your own deployment pass ``ray_actor_options={"runtime_env": runtime_env()}``. An actor on
    another machine does not inherit the environment of this process. The variables that vLLM and
    the hub's client read are included, except secrets, which Ray would show in logs and on its
    dashboard; set those on the machines. The variable for metrics of several processes is set
    before prometheus_client can be imported, and each replica replaces its value by its own folder.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PREFIXES) and not any(word in name for word in _SECRETS)
    }
    return {"env_vars": {**own, METRICS_VARIABLE: tempfile.gettempdir()}}


def application(
    model: str,
    *,
    replicas: int = 1,
    actor_options: Mapping[str, Any] | None = None,
    deployment_options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Build a Ray Serve application for `serve.run`, in which replicas of vLLM's server have one
    common address.

    No engine is started yet. The names of `arguments` and the values of `engine_args` are checked
    here; vLLM checks its own values when a replica starts.

    Args:
        model: the model that vLLM loads, a folder or a hub id.
        replicas: the number of engines.
        actor_options: options of each replica's actor, such as ``{"num_gpus": 1}``. A
            ``runtime_env`` among them is merged into `runtime_env` and takes precedence.
        deployment_options: any other options of `serve.deployment`, such as
            ``{"autoscaling_config": {...}}``.
        arguments: arguments of `engine_args`, and options of ``vllm serve`` with underscores.

    Raises:
        InvalidArgumentError: an option that vLLM's server does not have or that belongs to the
            plugin, or a wrong value.
        InvalidTypeError: a value has the wrong type.
        MissingDependencyError: Ray Serve or vLLM is not installed, or vLLM's version is not
            supported.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise MissingDependencyError(
            "ray: Ray Serve is not installed. Run pip install 'ray[serve]'."
        ) from error

    _parse_arguments(model, arguments)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="snapkv",
        num_replicas=replicas,
        ray_actor_options=_add_environment(actor_options or {}),
        **deployment_options or {},
    )
    return deployment.bind(model, arguments)


def _add_environment(actor_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the actor options whose "runtime_env" has the environment variables of
    `runtime_env` as well. A variable that the user has set keeps the user's value.
    """
    user_environment = dict(actor_options.get("runtime_env") or {})
    env_vars = {**runtime_env()["env_vars"], **(user_environment.get("env_vars") or {})}
    return {**actor_options, "runtime_env": {**user_environment, "env_vars": env_vars}}


class Replica:
    """A replica of the server: one engine of vLLM together with its HTTP routes. Ray Serve builds
    it in an actor.

    While it exists, its process writes metrics to a temporary folder; see `make_metrics_folder`.

    Args:
        model: the model that vLLM loads.
        arguments: the further arguments of `application`.

    Raises:
        InvalidArgumentError: an argument is unknown or wrong, or metrics cannot be written.
        InvalidTypeError: a value has the wrong type.
        MissingDependencyError: vLLM is not installed, or its version is not supported.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any]) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._stack.enter_context(make_metrics_folder())
        self._args = _parse_arguments(model, arguments)

    async def __serve_build_asgi_app__(self) -> Any:
        """Start the engine of this replica, and return vLLM's web application for it. Ray Serve
        calls this once. Errors of vLLM go through unchanged.
        """
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app

        self._engine = await self._stack.enter_async_context(build_async_engine_client(self._args))
        tasks = await self._engine.get_supported_tasks()
        app = build_app(self._args, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, self._args, tasks)
        app.state.server = SimpleNamespace()  # vLLM would stop uvicorn through it
        return app

    async def check_health(self) -> None:
        """Check that the engine of this replica is still running.

        Raises:
            Exception: the engine has died, so that Ray Serve replaces this replica.
        """
        await self._engine.check_health()

    async def __del__(self) -> None:
        """Stop the engine of this replica, and delete its folder of metrics. Ray Serve waits for
        this method.
        """
        await self._stack.aclose()


def _parse_arguments(model: str, arguments: Mapping[str, Any]) -> Any:
    """Return the namespace of options that ``vllm serve`` would have parsed from a command line
    with the same values, together with the options of this plugin.

    The values of vLLM's options are set as they are, without being parsed or checked.

    Args:
        model: the model that vLLM loads.
        arguments: arguments of `engine_args`, and options of ``vllm serve`` with underscores.

    Raises:
        InvalidArgumentError: an option that vLLM's server does not have or that belongs to the
            plugin, or a wrong value.
        InvalidTypeError: a value has the wrong type.
        MissingDependencyError: vLLM is not installed, or its version is not supported.
    """
    options = engine_args(**arguments)
    _, args = parse_options(model, ())
    for name, value in options.items():
        if not hasattr(args, name):
            problem = f"vllm serve does not have an option with this name, but got {name}={value!r}"
            raise wrong(name, problem, nearest(name, list(vars(args)), "Remove this option"))
        setattr(args, name, value)
    return args
