"""One HTTP request while it is answered: whose it is, and what of it vLLM's engine is not told.

A tenant is an API key on a server that has keys, and everybody on any other.
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
"""The one tenant of a server without API keys."""


@dataclass
class RequestContext:
    """Whose a request is, and whether its body was looked at."""

    tenant: str = SHARED_TENANT
    is_checked: bool = True  # whether settings in its body were, as in JSON alone
    refused: str | None = None  # why it is, see `names.reason_of`


_current: ContextVar[RequestContext | None] = ContextVar("snapkv_visit", default=None)


@contextmanager
def use_context(visit: RequestContext) -> Iterator[None]:
    """Make `visit` the current one inside the ``with`` block."""
    token = _current.set(visit)
    try:
        yield
    finally:
        _current.reset(token)


def current_context() -> RequestContext:
    """Return the request that is being answered; outside of any, one of nobody."""
    return _current.get() or RequestContext()


@contextmanager
def record_refusals() -> Iterator[None]:
    """Note why the current request is refused, if an error of this package leaves the block."""
    try:
        yield
    except SnapKVError as error:
        current_context().refused = reason_of(error)
        raise


def check_prompts(client: Any) -> None:
    """Have vLLM's client refuse prompts that were not checked, and keep tenants' blocks apart.

    Every endpoint sends its prompts by `client.generate`, which is replaced.
    """
    generate = client.generate

    def generate_looked_at(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        with record_refusals():
            _require_checked(sampling_params)
        return generate(_add_tenant_salt(prompt), sampling_params, *args, **kwargs)

    client.generate = generate_looked_at


def _require_checked(sampling_params: Any) -> None:
    """Raise RefusedError if a request names a setting in a body that is no JSON, as forms."""
    if not current_context().is_checked:
        given = getattr(sampling_params, "extra_args", None) or {}
        require_few_names(XARGS, given)
        for name in given:
            if correct_name(name) is not None:
                raise wrong(printable(name), "none in a form", "it", "leave it out")


# Whose a request is.


def tenant_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the tenant of a request that vLLM has let in: its API key, hashed."""
    said = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    key = said.decode("latin-1").partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()


def add_tenant(name: str) -> str:
    """Return a name of the current tenant's inside the engine, which no other tenant can write."""
    return f"{current_context().tenant[:32]}/{name}"


def _add_tenant_salt(prompt: Any) -> Any:
    """Return a prompt with the current tenant in its salt, so that it finds no other's blocks."""
    if current_context().tenant == SHARED_TENANT:
        return prompt
    own = add_tenant(prompt.get("cache_salt") or "")
    return {**prompt, "cache_salt": hashlib.sha256(own.encode()).hexdigest()}
