"""What to pass to vLLM so that it compresses prompts."""

from collections.abc import Mapping
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.policies import SnapKV
from snapkv.validation import DEFAULT_BUDGET, MAX_KERNEL_SIZE, MAX_WINDOW_SIZE
from snapkv_vllm.documents.sharing import Sharing
from snapkv_vllm.limits import Limits
from snapkv_vllm.settings import ServingSettings
from snapkv_vllm.versions import require_supported_version


def engine_args(
    *,
    budget: int = DEFAULT_BUDGET,
    policy: str = SnapKV.name,
    parameters: Mapping[str, Any] | None = None,
    protect_first: int = 0,
    max_window_size: int = MAX_WINDOW_SIZE,
    max_kernel_size: int = MAX_KERNEL_SIZE,
    limits: Limits | None = None,
    sharing: Sharing | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Arguments for ``vllm.LLM(model, **engine_args(budget=1024))`` or `AsyncEngineArgs`.

    Args:
        budget: tokens kept per KV head and layer; 0 compresses only requests with
            ``extra_args={"snapkv_budget": ...}``.
        policy: "snapkv", "adakv", "streaming-llm" or "tova"; all of them compress the prompt at its
            end.
        parameters: of the method, such as ``{"kernel_size": 13}``.
        protect_first: first tokens of every prompt that stay.
        max_window_size: the longest window that a request may ask for.
        max_kernel_size: the widest kernel that a request may ask for.
        limits: how many tokens a request may hold while its prompt is read and while its answer
            grows; by default all of them.
        sharing: of documents among requests; None shares none.
        options: any other option of vLLM; its own of the same kind are kept.

    Raises:
        InvalidArgumentError: a value out of range, or an option that the plugin must set itself.
        MissingDependencyError: no vLLM, or one of another version.
    """
    settings = ServingSettings(
        policy=policy,
        budget=budget,
        parameters=dict(parameters or {}),
        protect_first=protect_first,
        max_window_size=max_window_size,
        max_kernel_size=max_kernel_size,
        limits=limits or Limits(),
        sharing=sharing,
    )
    return {**options, **arguments(settings, options)}


OWN = ("worker_cls", "scheduler_cls", "additional_config", "logits_processors")
"""The arguments of vLLM through which the plugin works."""


def arguments(settings: ServingSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """`OWN` for these settings, beside what the user gives for them.

    Raises:
        InvalidArgumentError: an option that the plugin must set itself.
        MissingDependencyError: no vLLM, or one of another version.
    """
    require_supported_version()
    from snapkv_vllm.requests import name_of_check

    for taken in ("worker_cls", "scheduler_cls"):
        if given.get(taken) not in (None, "auto"):
            raise InvalidArgumentError(
                f"{taken}: expected none, since snapkv brings its own, got {given[taken]!r}; "
                "leave it out"
            )
    return {
        "worker_cls": "snapkv_vllm.worker.CompressingWorker",
        "scheduler_cls": "snapkv_vllm.scheduler.scheduler",
        "additional_config": {**(given.get("additional_config") or {}), **settings.to_config()},
        "logits_processors": [*(given.get("logits_processors") or ()), name_of_check(settings)],
    }
