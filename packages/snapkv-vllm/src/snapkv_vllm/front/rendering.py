"""Checks of spans and the search for the question, at the place where vLLM's server renders a
request to tokens.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from snapkv.errors import SnapKVError
from snapkv_vllm.admission.methods import require_spans_fit
from snapkv_vllm.admission.names import (
    PREFIX,
    SESSION,
    XARGS,
    status_of,
    wrong,
)
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.admission.spans import SPANS_FIELD
from snapkv_vllm.front.question import count_question_tokens
from snapkv_vllm.front.request_context import add_tenant, record_refusals

_SESSION, _VOTERS = PREFIX + SESSION, PREFIX + "voters"

Render = Callable[..., Awaitable[Any]]


def resolve_requests(renderer: Any, settings: ServingSettings) -> None:
    """Patch the renderer of vLLM's server, so that it checks the spans of a request against its
    prompt and lets the question of a chat vote. A request that is refused gets an error response of
    vLLM.

    Args:
        renderer: vLLM's renderer, which is changed in place.
        settings: the settings of the server.
    """
    _Resolver(renderer, settings)


class _Resolver:
    """Wraps the methods of vLLM's renderer that convert a request to the tokens of its prompt."""

    def __init__(self, renderer: Any, settings: ServingSettings) -> None:
        self._renderer, self._settings = renderer, settings
        resolvers = {
            "render_completion": self._resolve_completion,
            "render_chat": self._resolve_chat,
            "render_responses": self._resolve_responses,
        }
        for name, resolve in resolvers.items():
            render = getattr(renderer, name)
            setattr(renderer, name, partial(self._render, render, resolve))

    async def _render(self, render: Render, resolve: Render, request: Any, **options: Any) -> Any:
        """Render a request as vLLM does, and then store the settings that depend on its prompt in
        the request.

        Before that, the tenant is put in front of the name of a session. Both change `request` in
        place.

        Args:
            render: vLLM's method.
            resolve: returns the settings to store, whose spans are checked against the prompt, or
                None to leave the settings as they are.
            request: vLLM's request.
            options: further arguments of `render`.

        Returns:
            The result of `render`, or an error response of vLLM if the request is refused.
        """
        extra_args = getattr(request, XARGS, None) or {}
        if _SESSION in extra_args:
            extra_args = {**extra_args, _SESSION: add_tenant(extra_args[_SESSION])}
            setattr(request, XARGS, extra_args)
        before = request.model_copy()  # rendering may change the request
        made = await render(request, **options)
        try:
            with record_refusals():
                found = await resolve(before, made, dict(extra_args))
                if found:
                    self._require_spans_fit(found, made)
                    setattr(request, XARGS, found)
        except SnapKVError as error:
            status = HTTPStatus(status_of(error))
            return self._renderer.create_error_response(str(error), status.phrase, status)
        return made

    async def _resolve_completion(self, request: Any, made: Any, extra_args: dict[str, Any]) -> Any:
        """Return the settings to store in a request for a completion: its own settings if it has
        spans, otherwise None. The result is also None if vLLM has answered with an error.

        Args:
            request: vLLM's request, which is not used.
            made: what vLLM has rendered from it.
            extra_args: the settings of the request.

        Raises:
            RefusedError: there are spans and several prompts.
        """
        if SPANS_FIELD not in extra_args or not isinstance(made, list):  # vLLM returns an error
            return None
        if len(made) != 1:
            problem = f"a request with spans can have only one prompt, but got {len(made)} prompts"
            raise wrong(SPANS_FIELD, problem, "Send a separate request for each prompt")
        return extra_args

    async def _resolve_chat(self, request: Any, made: Any, extra_args: dict[str, Any]) -> Any:
        """Return the settings to store in a chat request: a copy of its own settings with the
        number of voters, if the question decides this number. Otherwise they are its own settings
        if it has spans, and None if it has none. The result is also None if vLLM has answered with
        an error.

        Args:
            request: vLLM's request, whose messages are searched for the question.
            made: what vLLM has rendered from it.
            extra_args: the settings of the request.
        """
        if not isinstance(made, tuple):
            return None
        found = await self._add_voters(request.messages, made, extra_args)
        return found or (extra_args if SPANS_FIELD in extra_args else None)

    async def _resolve_responses(self, request: Any, made: Any, extra_args: dict[str, Any]) -> Any:
        """Return the settings to store in a request to ``/v1/responses``: a copy of its own
        settings with the number of voters. The result is None if the question does not decide this
        number, and None or an empty list if vLLM has rendered no messages, as after an error.

        Args:
            request: vLLM's request, which is not used.
            made: what vLLM has rendered from it, with its messages.
            extra_args: the settings of the request.
        """
        messages = getattr(made, "messages", None)
        return messages and await self._add_voters(messages, made, extra_args)

    async def _add_voters(
        self, messages: Sequence[Any], made: Any, extra_args: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return a copy of the settings with the number of voters added to them. The result is None
        if the question is not found, or if the method or its parameters decide this number; see
        `ServingSettings.count_voters`.

        Args:
            messages: the messages of the chat.
            made: what vLLM has rendered from them.
            extra_args: the settings of the request.
        """
        if self._settings.count_voters(extra_args, 1) is None:
            return None
        tokenizer = self._renderer.renderer.get_tokenizer()
        tokens = await asyncio.to_thread(_question_tokens, messages, made, tokenizer)
        voters = None if tokens is None else self._settings.count_voters(extra_args, tokens)
        return None if voters is None else {**extra_args, _VOTERS: voters}

    def _require_spans_fit(self, extra_args: Mapping[str, Any], made: Any) -> None:
        """Check that the spans of a request lie inside its prompt. A prompt without token ids is
        not checked.

        The scheduler would find it too late for a status 400.

        Raises:
            SnapKVError: a span ends too late, or the spans do not fit into the budget.
        """
        (inputs,) = _engine_inputs(made)
        if SPANS_FIELD in extra_args and (ids := inputs.get("prompt_token_ids")) is not None:
            plan = self._settings.plan_request(extra_args, len(ids))
            require_spans_fit(plan.policy, len(ids))


def _question_tokens(messages: Sequence[Any], made: Any, tokenizer: Any) -> int | None:
    """Count the last tokens of a chat's prompt, from the beginning of the question.

    Args:
        messages: the messages of the chat.
        made: what vLLM has rendered from them, for one prompt.
        tokenizer: the tokenizer of the model.

    Returns:
        The number of tokens; None for a prompt without text or token ids, and if
        `count_question_tokens` returns None.
    """
    (inputs,) = _engine_inputs(made)
    text, ids = inputs.get("prompt"), inputs.get("prompt_token_ids")
    if not (isinstance(text, str) and ids):
        return None
    return count_question_tokens([dict(one) for one in messages], text, ids, tokenizer)


def _engine_inputs(made: Any) -> Sequence[Mapping[str, Any]]:
    """Return the inputs for the engine that vLLM has made from a request, one for each prompt."""
    if hasattr(made, "engine_input"):  # the request was for /v1/responses
        return [made.engine_input]
    inputs: Sequence[Mapping[str, Any]] = made[1] if isinstance(made, tuple) else made
    return inputs
