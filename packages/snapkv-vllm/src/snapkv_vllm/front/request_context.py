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
    """Make `context` the current context inside the ``with`` block, and restore the former one
    afterwards.
    """
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context() -> RequestContext:
    """Return the context of the HTTP request that is being answered. If there is none, a new one is
    returned, and changes to it are lost.
    """
    return _current.get() or RequestContext()


@contextmanager
def record_refusals() -> Iterator[None]:
    """If the ``with`` block raises a `SnapKVError`, record in the current context why the request
    is refused, and raise the error again.
    """
    try:
        yield
    except SnapKVError as error:
        current_context().refusal = reason_of(error)
        raise


def check_prompts(client: Any) -> None:
    """Patch the method `generate` of vLLM's client, with which every endpoint sends its prompts to
    the engine.

    The patched method raises a RefusedError for settings in a body that was not checked, and gives
    the prompts of different tenants different cache salts.
    """
    generate = client.generate

    def generate_checked(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        with record_refusals():
            _require_checked(sampling_params)
        return generate(_add_tenant_salt(prompt), sampling_params, *args, **kwargs)

    client.generate = generate_checked


def _require_checked(sampling_params: Any) -> None:
    """Check that a request has no settings in a body that is not JSON, such as a form. A request
    whose body was checked is always accepted.

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
    """Return the tenant of a request, which is the SHA-256 hash of its API key in hexadecimal
    digits. vLLM has checked the key. A request without a key has the hash of an empty key.

    Args:
        headers: the headers of the request, as ASGI passes them.
    """
    header = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    key = header.decode("latin-1").partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()


def add_tenant(name: str) -> str:
    """Return `name` with the first 32 digits of the current tenant and a slash in front of it, so
    that no other tenant can use the same name. On a server without API keys only the slash is
    added.
    """
    return f"{current_context().tenant[:32]}/{name}"


def _add_tenant_salt(prompt: Any) -> Any:
    """Return a copy of a prompt whose cache salt depends on the current tenant, so that it reuses
    no blocks of another tenant. On a server without API keys the prompt itself is returned.

    Args:
        prompt: vLLM's input for the engine, a mapping. The new salt is a SHA-256 hash of the tenant
            and the "cache_salt" that the prompt has, if any.
    """
    if current_context().tenant == SHARED_TENANT:
        return prompt
    own = add_tenant(prompt.get("cache_salt") or "")
    return {**prompt, "cache_salt": hashlib.sha256(own.encode()).hexdigest()}
