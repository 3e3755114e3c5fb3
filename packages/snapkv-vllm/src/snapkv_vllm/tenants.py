"""Whose a request is: its API key's on a server that has keys, everybody's on any other."""

import hashlib
from collections.abc import Iterable
from typing import Any

from snapkv_vllm.visits import EVERYBODY, current


def has_keys(args: Any) -> bool:
    """Whether vLLM lets only those in who have an API key."""
    from vllm import envs

    return any(args.api_key or [envs.VLLM_API_KEY])


def tenant_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The tenant of a request that vLLM has let in: its API key, hashed."""
    said = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    key = said.decode("latin-1").partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()


def owned(name: str) -> str:
    """A name of the current tenant's inside the engine, which no other tenant can write."""
    return f"{current().tenant[:32]}/{name}"


def kept_apart(prompt: Any, sampling_params: Any) -> Any:
    """A prompt that begins with no blocks that another tenant's has cached: with it in its salt."""
    if current().tenant == EVERYBODY:
        return prompt
    own = owned(prompt.get("cache_salt") or "")
    return {**prompt, "cache_salt": hashlib.sha256(own.encode()).hexdigest()}
