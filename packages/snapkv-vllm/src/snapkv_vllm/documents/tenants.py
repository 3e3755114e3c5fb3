"""Whose a request is: documents of one API key are none of another's business."""

import hashlib
from collections.abc import Iterable

EVERYBODY = ""
"""The one tenant of a server without API keys, or on which keys share their documents."""


def tenant_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The tenant of a request that vLLM has let in: its API key, hashed.

    Args:
        headers: of an ASGI scope.
    """
    said = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    key = said.decode("latin-1").partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()


def shown_tenant(tenant: str) -> str:
    """A tenant in the log: the first digits of its hash, since a key itself is a secret."""
    return f"key {tenant[:8]}" if tenant else "everybody"
