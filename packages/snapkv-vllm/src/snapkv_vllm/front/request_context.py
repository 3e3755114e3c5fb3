"""What is known about an HTTP request while it is answered, and about its tenant.

A tenant is the owner of an API key. On a server without API keys all requests have the same tenant.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from snapkv.errors import SnapKVError
from snapkv_vllm.admission.names import (
    XARGS,
    correct_name,
    printable,
    reason_of,
    require_few_names,
    wrong,
)

SHARED_TENANT = ""
"""The tenant of all requests on a server without API keys."""


@dataclass
class RequestContext:
    """What is known about an HTTP request: its tenant, whether its body was checked, and why it was
    refused.
    """

    tenant: str = SHARED_TENANT
    is_checked: bool = True  # False while the settings in a body were not checked
    refusal: str | None = None  # the reason if it was refused, see `names.reason_of`


_current: ContextVar[RequestContext | None] = ContextVar("snapkv_request", default=None)


@contextmanager
def use_context(context: RequestContext) -> Iterator[None]:
    """Make `context` the current context inside the ``with`` block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context() -> RequestContext:
    """Return the context of the HTTP request that is being answered, or a new one if there
    is none.
    """
    return _current.get() or RequestContext()


@contextmanager
def record_refusals() -> Iterator[None]:
    """Record in the current context why a request is refused, if the ``with`` block raises a
    `SnapKVError`.
    """
    try:
        yield
    except SnapKVError as error:
        current_context().refusal = reason_of(error)
        raise


def check_prompts(client: Any) -> None:
    """Patch the method `generate` of vLLM's client, with which every endpoint sends its prompts to
    the engine.

    Settings in bodies that were not checked are refused, and prompts of different tenants get
    different cache salts.
    """
    generate = client.generate

    def generate_checked(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        with record_refusals():
            _require_checked(sampling_params)
        return generate(_add_tenant_salt(prompt), sampling_params, *args, **kwargs)

    client.generate = generate_checked


def _require_checked(sampling_params: Any) -> None:
    """Check that a request has no settings in a body that is not JSON, such as a form.

    Raises:
        RefusedError: the body was not checked and has a setting, or too many names.
    """
    if not current_context().is_checked:
        extra_args = getattr(sampling_params, "extra_args", None) or {}
        require_few_names(XARGS, extra_args)
        for name in extra_args:
            if correct_name(name) is not None:
                problem = "settings can only be sent as JSON and not in a form"
                raise wrong(printable(name), problem, "Send the request as JSON")


# Tenants.


def tenant_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the tenant of a request, which is the SHA-256 hash of its API key. vLLM has checked
    the key.
    """
    header = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    key = header.decode("latin-1").partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()


def add_tenant(name: str) -> str:
    """Put the current tenant in front of a name, so that no other tenant can use the same name."""
    return f"{current_context().tenant[:32]}/{name}"


def _add_tenant_salt(prompt: Any) -> Any:
    """Return a prompt whose cache salt contains the current tenant, so that it reuses no blocks of
    another tenant.
    """
    if current_context().tenant == SHARED_TENANT:
        return prompt
    own = add_tenant(prompt.get("cache_salt") or "")
    return {**prompt, "cache_salt": hashlib.sha256(own.encode()).hexdigest()}
