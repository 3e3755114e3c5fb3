"""Spans, sessions and questions on vLLM's own server: looked up where it renders a request.

Bodies hold spans and a session next to their other fields, as clients of OpenAI and Anthropic send
them (``extra_body``); inside vLLM they travel among the request's own settings, spans as JSON.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from snapkv.errors import SnapKVError
from snapkv_vllm.admission import meant, require_few_names
from snapkv_vllm.agents.hints import session_named
from snapkv_vllm.agents.question import question_tokens
from snapkv_vllm.methods import require_spans_within
from snapkv_vllm.names import (
    PREFIX,
    SESSION,
    XARGS,
    shown,
    status_of,
    wrong,
)
from snapkv_vllm.settings import ServingSettings
from snapkv_vllm.spans import NAME
from snapkv_vllm.tenants import owned
from snapkv_vllm.visits import current, noting_refusals

_SESSION, _VOTERS = PREFIX + SESSION, PREFIX + "voters"

Render = Callable[..., Awaitable[Any]]


def moved_inside(
    body: object, path: str, *, has_sessions: bool
) -> tuple[object, Mapping[str, str]]:
    """A body with its spans and session where vLLM hands them on; itself without any.

    And what its client calls the settings that were moved. Raises InvalidArgumentError for what is
    there already, or cannot be there.
    """
    if not isinstance(body, dict):
        return body, {}
    found: dict[str, Any] = {}
    fields: dict[str, str] = {}
    if NAME in body:
        found[NAME] = json.dumps(body[NAME])
    named = session_named(body, path) if has_sessions else None
    if named is not None:
        fields[_SESSION], found[_SESSION] = named
    if not found:
        return body, {}
    inside = {} if (given := body.get(XARGS)) is None else given
    if not isinstance(inside, dict):
        raise wrong(XARGS, "an object", f"something of type {type(inside).__name__}", "pass one")
    for name in found.keys() & inside.keys():
        raise wrong(name, "it once", f"it inside {XARGS}, too", "leave one of them out")
    others = {name: value for name, value in body.items() if name != NAME}
    called = {name: fields[name] for name in found.keys() & fields.keys()}
    return {**others, XARGS: {**inside, **found}}, called


def as_checked(prompt: Any, sampling_params: Any) -> Any:
    """The prompt of a request that names no setting in a body that is no JSON, as forms."""
    if not current().is_checked:
        given = getattr(sampling_params, "extra_args", None) or {}
        require_few_names(XARGS, given)
        for name in given:
            if meant(name) is not None:
                raise wrong(shown(name), "none in a form", "it", "leave it out")
    return prompt


# Of requests.


def resolve_requests(state: Any, settings: ServingSettings) -> None:
    """Have a server's renderer check spans against the prompt, and look up the question.

    `state` is that of vLLM's FastAPI application.
    """
    renderer = getattr(state, "online_renderer", None)
    if renderer is not None:  # else an application without models
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
