"""One HTTP request while it is answered: what vLLM's renderer and engine are not told of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from snapkv.errors import SnapKVError
from snapkv_vllm.names import reason_of

EVERYBODY = ""
"""The one tenant of a server without API keys, or of what its keys share."""


@dataclass
class Visit:
    """Whose a request is, and whether its body was looked at."""

    tenant: str = EVERYBODY
    is_checked: bool = True  # whether settings in its body were, as in JSON alone
    refused: str | None = None  # why it is, see `names.reason_of`


_current: ContextVar[Visit | None] = ContextVar("snapkv_visit", default=None)


@contextmanager
def answering(visit: Visit) -> Iterator[None]:
    token = _current.set(visit)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Visit:
    """The request that is being answered; outside of any, one of nobody."""
    return _current.get() or Visit()


@contextmanager
def noting_refusals() -> Iterator[None]:
    """Note why the current request is refused, if an error of this package leaves the block."""
    try:
        yield
    except SnapKVError as error:
        current().refused = reason_of(error)
        raise


def before_engine(state: Any, look: Callable[[Any, Any], Any]) -> None:
    """Have a server's engine get what `look` makes of each prompt and its sampling parameters.

    `state` is that of vLLM's FastAPI application; whatever endpoint a request comes by.
    """
    client = getattr(state, "engine_client", None)
    if client is None:  # an application without an engine
        return
    generate = client.generate

    def generate_looked_at(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        with noting_refusals():
            prompt = look(prompt, sampling_params)
        return generate(prompt, sampling_params, *args, **kwargs)

    client.generate = generate_looked_at
