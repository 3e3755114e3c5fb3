"""Spans, sessions and questions on vLLM's own server: looked up where it renders a request."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from snapkv.errors import SnapKVError
from snapkv_vllm.admission.methods import require_spans_within
from snapkv_vllm.admission.names import (
    PREFIX,
    SESSION,
    XARGS,
    status_of,
    wrong,
)
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.admission.spans import NAME
from snapkv_vllm.front.question import question_tokens
from snapkv_vllm.front.visits import noting_refusals, owned

_SESSION, _VOTERS = PREFIX + SESSION, PREFIX + "voters"

Render = Callable[..., Awaitable[Any]]


def resolve_requests(renderer: Any, settings: ServingSettings) -> None:
    """Have a server's renderer check spans against the prompt, and look up the question."""
    _Resolver(renderer, settings)


class _Resolver:
    """Stands before the methods of a server's renderer, which return a prompt's tokens."""

    def __init__(self, renderer: Any, settings: ServingSettings) -> None:
        self._renderer, self._settings = renderer, settings
        resolvers = {
            "render_completion": self._of_completion,
            "render_chat": self._of_chat,
            "render_responses": self._of_responses,
        }
        for name, resolve in resolvers.items():
            render = getattr(renderer, name)
            setattr(renderer, name, partial(self._resolved, render, resolve))

    async def _resolved(self, render: Render, resolve: Render, request: Any, **options: Any) -> Any:
        given = getattr(request, XARGS, None) or {}
        if _SESSION in given:
            given = {**given, _SESSION: owned(given[_SESSION])}
            setattr(request, XARGS, given)
        before = request.model_copy()  # rendering may change it
        made = await render(request, **options)
        try:
            with noting_refusals():
                found = await resolve(before, made, dict(given))
                if found:
                    self._require_spans_fit(found, made)
                    setattr(request, XARGS, found)
        except SnapKVError as error:
            status = HTTPStatus(status_of(error))
            return self._renderer.create_error_response(str(error), status.phrase, status)
        return made

    async def _of_completion(self, request: Any, made: Any, given: dict[str, Any]) -> Any:
        if NAME not in given or not isinstance(made, list):  # an error of vLLM's
            return None
        if len(made) != 1:
            raise wrong(NAME, "one prompt", f"{len(made)}", "send a request for each")
        return given

    async def _of_chat(self, request: Any, made: Any, given: dict[str, Any]) -> Any:
        if not isinstance(made, tuple):
            return None
        asked = await self._with_voters(request.messages, made, given)
        return asked or (given if NAME in given else None)

    async def _of_responses(self, request: Any, made: Any, given: dict[str, Any]) -> Any:
        messages = getattr(made, "messages", None)
        return messages and await self._with_voters(messages, made, given)

    async def _with_voters(
        self, messages: Sequence[Any], made: Any, given: dict[str, Any]
    ) -> dict[str, Any] | None:
        """With how many of the last tokens vote; None where no question is asked for, or known."""
        if self._settings.voters_of(given, 1) is None:
            return None
        tokenizer = self._renderer.renderer.get_tokenizer()
        asked = await asyncio.to_thread(_question_tokens, messages, made, tokenizer)
        voters = None if asked is None else self._settings.voters_of(given, asked)
        return None if voters is None else {**given, _VOTERS: voters}

    def _require_spans_fit(self, given: Mapping[str, Any], made: Any) -> None:
        """As the scheduler will look at them, which cannot answer 400 any more."""
        (inputs,) = _inputs_of(made)
        if NAME in given and (ids := inputs.get("prompt_token_ids")) is not None:
            plan = self._settings.plan_for(given, len(ids))
            require_spans_within(plan.policy, len(ids))


def _question_tokens(messages: Sequence[Any], made: Any, tokenizer: Any) -> int | None:
    (inputs,) = _inputs_of(made)
    text, ids = inputs.get("prompt"), inputs.get("prompt_token_ids")
    if not (isinstance(text, str) and ids):
        return None
    return question_tokens([dict(one) for one in messages], text, ids, tokenizer)


def _inputs_of(made: Any) -> Sequence[Mapping[str, Any]]:
    """What goes to the engine, of what vLLM renders."""
    if hasattr(made, "engine_input"):  # of a response
        return [made.engine_input]
    inputs: Sequence[Mapping[str, Any]] = made[1] if isinstance(made, tuple) else made
    return inputs
