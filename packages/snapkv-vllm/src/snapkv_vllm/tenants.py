"""Whose a request is: its API key's on a server that has keys, everybody's on any other."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

EVERYBODY = ""
"""The one tenant of a server without API keys, or of what its keys share."""

_current: ContextVar[str] = ContextVar("snapkv_tenant", default=EVERYBODY)


def has_keys(args: Any) -> bool:
    """Whether vLLM lets only those in who have an API key."""
    from vllm import envs

    return any(args.api_key or [envs.VLLM_API_KEY])


def tenant_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The tenant of a request that vLLM has let in: its API key, hashed."""
    said = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    key = said.decode("latin-1").partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()


@contextmanager
def answering(tenant: str) -> Iterator[None]:
    """Answer one HTTP request of a tenant."""
    token = _current.set(tenant)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> str:
    """The tenant whose request is being answered."""
    return _current.get()


def owned(name: str) -> str:
    """A name of the current tenant's inside the engine, which no other tenant can write."""
    return f"{current()[:32]}/{name}"


def keep_prefixes_apart(state: Any) -> None:
    """Let no tenant's request begin with blocks that another's has cached.

    `state` is that of vLLM's FastAPI application. Whatever endpoint a request comes by, its salt
    reaches the engine with the tenant in it.
    """
    client = getattr(state, "engine_client", None)
    if client is None:  # an application without an engine
        return
    generate = client.generate

    def generate_apart(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if current() != EVERYBODY:
            own = owned(prompt.get("cache_salt") or "")
            prompt = {**prompt, "cache_salt": hashlib.sha256(own.encode()).hexdigest()}
        return generate(prompt, *args, **kwargs)

    client.generate = generate_apart
