"""vLLM's OpenAI-compatible server with compressed prompts as a Ray Serve application.

Ray is imported when an application is asked for.
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
    """What Ray must give to actors that run an engine; `application` does so by itself.

    For a deployment of your own: ``ray_actor_options={"runtime_env": runtime_env()}``. An actor on
    another machine does not inherit the environment of the process that asks for it. What vLLM and
    the hub's client read goes along, except secrets, which Ray would show in its logs and its
    dashboard: those belong to the machines. Metrics of several processes are switched on before
    anything can import prometheus_client; each replica puts a folder of its own there.
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
    """An application for `serve.run`: replicas of vLLM's server behind one address.

    Args:
        model: what vLLM loads: a folder or a hub id.
        replicas: how many engines.
        actor_options: of each replica, such as ``{"num_gpus": 1}``; a ``runtime_env`` among them is
            laid over `runtime_env`.
        deployment_options: any other option of `serve.deployment`, such as
            ``{"autoscaling_config": {...}}``.
        arguments: those of `engine_args`, and options of ``vllm serve`` with underscores.

    Raises:
        InvalidArgumentError: an option that vLLM's server does not have, or a wrong value.
        MissingDependencyError: no Ray Serve, no vLLM, or one of another version.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise MissingDependencyError(
            "ray: expected Ray Serve, which is not installed; run pip install 'ray[serve]'"
        ) from error

    _parse_arguments(model, arguments)
    kind = serve.deployment(
        serve.ingress()(Replica),
        name="snapkv",
        num_replicas=replicas,
        ray_actor_options=_add_environment(actor_options or {}),
        **deployment_options or {},
    )
    return kind.bind(model, arguments)


def _add_environment(actor_options: Mapping[str, Any]) -> dict[str, Any]:
    """Actor options with `runtime_env`; what the user says there goes first."""
    given = dict(actor_options.get("runtime_env") or {})
    env_vars = {**runtime_env()["env_vars"], **(given.get("env_vars") or {})}
    return {**actor_options, "runtime_env": {**given, "env_vars": env_vars}}


class Replica:
    """One engine with vLLM's own HTTP routes; Ray Serve makes it in an actor.

    Args:
        model: what vLLM loads.
        arguments: as `application` takes them.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any]) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._stack.enter_context(make_metrics_folder())
        self._args = _parse_arguments(model, arguments)

    async def __serve_build_asgi_app__(self) -> Any:
        """Start the engine, and make vLLM's web application over it."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app

        self._engine = await self._stack.enter_async_context(build_async_engine_client(self._args))
        tasks = await self._engine.get_supported_tasks()
        app = build_app(self._args, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, self._args, tasks)
        app.state.server = SimpleNamespace()  # vLLM tells uvicorn to stop; here Ray Serve decides
        return app

    async def check_health(self) -> None:
        """Raise when the engine has died, so that Ray Serve replaces this replica."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        """Stop the engine; Ray Serve waits for it."""
        await self._stack.aclose()


def _parse_arguments(model: str, arguments: Mapping[str, Any]) -> Any:
    """The namespace that ``vllm serve`` would have made of these options."""
    options = engine_args(**arguments)
    _, args = parse_options(model, ())
    for name, value in options.items():
        if not hasattr(args, name):
            option = "an option of vllm serve, with underscores"
            remedy = f"leave it out{nearest(name, list(vars(args)))}"
            raise wrong(name, option, f"{name}={value!r}", remedy)
        setattr(args, name, value)
    return args
