"""Spans, edits and questions on vLLM's own server: looked up where it renders a request.

Bodies hold spans and edits next to their other fields, as clients of OpenAI and Anthropic send them
(``extra_body``); inside vLLM they travel as JSON among the request's own settings. The response
tells what was applied.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from snapkv.errors import SnapKVError
from snapkv.policies.spans import Span, Spans
from snapkv_vllm.admission import meant, require_few_names
from snapkv_vllm.agents.edits import Applied, applied, edits_of
from snapkv_vllm.agents.hints import session_named
from snapkv_vllm.agents.messages import (
    Marked,
    TokenizedChat,
    located,
    marked,
    question_tokens,
    spans_of,
)
from snapkv_vllm.agents.places import tokens_of
from snapkv_vllm.methods import require_spans_within
from snapkv_vllm.names import (
    CHATS,
    CONTEXT,
    COUNT,
    DOCUMENT,
    EDITS,
    PREFIX,
    SESSION,
    XARGS,
    shown,
    status_of,
    wrong,
)
from snapkv_vllm.settings import ServingSettings
from snapkv_vllm.spans import DROP, NAME, PROTECT, SpanEdit, entries_of
from snapkv_vllm.streams import Message, Send
from snapkv_vllm.tenants import owned
from snapkv_vllm.visits import Visit, current, noting_refusals

_EDITS, _SESSION = PREFIX + EDITS, PREFIX + SESSION

_BUDGET, _VOTERS = PREFIX + "budget", PREFIX + "voters"

Render = Callable[..., Awaitable[Any]]


def moved_inside(
    body: object, path: str, *, has_sessions: bool
) -> tuple[object, Mapping[str, str]]:
    """A body with its spans, edits and session where vLLM hands them on; itself without any.

    And what its client calls the settings that were moved. Raises InvalidArgumentError for what is
    there already, or cannot be there.
    """
    if not isinstance(body, dict):
        return body, {}
    found: dict[str, Any] = {}
    fields = {_EDITS: CONTEXT}
    if NAME in body:
        found[NAME] = json.dumps(body[NAME])
    edits = body.get(CONTEXT)
    is_own = isinstance(edits, dict) or (path in CHATS and edits is not None)  # OpenAI's is a list
    if is_own and path != COUNT:
        found[_EDITS] = json.dumps(edits)
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
    others = {name: value for name, value in body.items() if name not in (NAME, CONTEXT)}
    called = {name: fields[name] for name in found.keys() & fields.keys()}
    return {**others, XARGS: {**inside, **found}}, called


def note_body(body: object, path: str) -> None:
    """Note that a body is JSON, and the edits of a chat whose tokens are counted.

    vLLM has no place for those. Raises as `edits_of` does.
    """
    visit, given = current(), body.get(CONTEXT) if isinstance(body, dict) else None
    visit.is_checked = body is not None
    if path == COUNT and given is not None:
        edits_of(given)
        visit.counted_edits = json.dumps(given)


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
    """Have a server's renderer look up what requests say of messages, and where the question is.

    `state` is that of vLLM's FastAPI application.
    """
    renderer = getattr(state, "online_renderer", None)
    if renderer is not None:  # else an application without models
        _Resolver(renderer, settings)


class _Resolver:
    """Stands before the methods of a server's renderer, which return a prompt's tokens."""

    def __init__(self, renderer: Any, settings: ServingSettings) -> None:
        self._renderer, self._settings = renderer, settings
        self._render_chat: Render = renderer.render_chat
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
        if (edits := current().counted_edits) is not None:
            given = {**given, _EDITS: edits}
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
        if not isinstance(made, tuple) or PREFIX + DOCUMENT in given:
            return None
        has_spans = bool({NAME, _EDITS} & given.keys())
        if has_spans:
            given = await self._with_spans(request, made, given)
        asked = await self._with_voters(request.messages, made, given)
        return asked or (given if has_spans else None)

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

    async def _with_spans(self, request: Any, made: Any, given: dict[str, Any]) -> dict[str, Any]:
        entries = list(entries_of(given.pop(NAME, [])))
        edits = given.pop(_EDITS, None)
        if edits is not None or any(entry.span is None for entry in entries):
            chat = await _looked_up(request, made, self._render_chat, self._renderer)
            entries = spans_of(entries, chat)
            if edits is not None:
                goes = [one.span for one in entries if one.span and one.do != PROTECT]
                entries += self._edited(applied(edits_of(edits), chat), goes, given)
        return {**given, NAME: json.dumps([entry.as_json for entry in entries])}

    def _edited(
        self, found: Applied, goes: Sequence[Span], given: dict[str, Any]
    ) -> list[SpanEdit]:
        """The spans of edits that were applied, noted for the response; what `goes` is not kept."""
        entries = [SpanEdit(do=DROP, span=span) for span in found.cleared.parts]
        if _SESSION in given:  # what may go later must be there whole until then
            whole = found.whole.without(Spans.of(NAME, goes))
            entries += [SpanEdit(do=PROTECT, span=span) for span in whole.parts]
            budget = given.get(_BUDGET, self._settings.budget)
            given[_BUDGET] = budget + whole.tokens if budget else 0
        visit = current()
        visit.said, visit.cleared_tokens = found.said, found.cleared.tokens
        return entries

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


async def _looked_up(request: Any, made: Any, render: Render, renderer: Any) -> TokenizedChat:
    """Where the texts of a chat lie among the tokens that vLLM has made of it."""
    messages = [dict(one) for one in request.messages]
    marks = marked(messages)
    again = await render(
        request.model_copy(update={"messages": marks.messages}), skip_mm_cache=True
    )
    if not isinstance(again, tuple):
        raise wrong(NAME, "a chat that can be rendered with other texts", "another", _BY_TOKENS)
    (of_texts,), (of_marks,) = _inputs_of(made), _inputs_of(again)
    tokenizer = renderer.renderer.get_tokenizer()
    found = await asyncio.to_thread(_chat_of, messages, marks, of_texts, of_marks, tokenizer)
    if found is not None:
        return found
    most = getattr(request, "truncate_prompt_tokens", None)
    if most is not None and len(of_texts.get("prompt_token_ids", ())) >= most:
        name, remedy = "truncate_prompt_tokens", f"leave it out, or {_BY_TOKENS}"
        raise wrong(name, "none that cuts a chat whose messages are looked up", most, remedy)
    says = "a model whose tokenizer says where the tokens of a chat's text are"
    raise wrong(NAME, says, "another", _BY_TOKENS)


_BY_TOKENS = "pass spans of tokens"


def _chat_of(
    messages: Sequence[Mapping[str, Any]],
    marks: Marked,
    of_texts: Mapping[str, Any],
    of_marks: Mapping[str, Any],
    tokenizer: Any,
) -> TokenizedChat | None:
    """What takes long where a chat is long, for a thread; None where tokens are not its text's."""
    text, marked_text = of_texts.get("prompt"), of_marks.get("prompt")
    tokens = None
    if isinstance(text, str) and isinstance(marked_text, str):
        tokens = tokens_of(tokenizer, text, of_texts.get("prompt_token_ids", ()))
    if tokens is None:
        return None
    return TokenizedChat(messages, located(str(text), str(marked_text), marks.pieces), tokens)


def _inputs_of(made: Any) -> Sequence[Mapping[str, Any]]:
    """What goes to the engine, of what vLLM renders."""
    if hasattr(made, "engine_input"):  # of a response
        return [made.engine_input]
    inputs: Sequence[Mapping[str, Any]] = made[1] if isinstance(made, tuple) else made
    return inputs


# Of responses.


class Saying:
    """Puts what was applied into a response: into its JSON, or one of the events of a stream."""

    def __init__(self, visit: Visit, send: Send) -> None:
        self._visit, self._send = visit, send
        self._start: Message | None = None  # of a JSON response, which waits for its length
        self._body = b""
        self._is_said = False

    async def __call__(self, message: Message) -> None:
        if self._visit.said is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            waits = message["status"] == 200 and kind.startswith(b"application/json")
            self._start = message if waits else None
            self._is_said = message["status"] != 200
            if not waits:
                await self._send(message)
        elif self._start is None:
            own = {} if self._is_said else {"body": self._in_events(message.get("body", b""))}
            await self._send({**message, **own})
        else:
            await self._in_json(message)

    async def _in_json(self, message: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body") or self._start is None:
            return
        body = json.dumps(self._told(json.loads(self._body))).encode()
        others = [one for one in self._start["headers"] if one[0].lower() != b"content-length"]
        headers = [*others, (b"content-length", str(len(body)).encode())]
        await self._send({**self._start, "headers": headers})
        await self._send({**message, "body": body})

    def _told(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON with what was applied, or without the tokens that it clears."""
        if self._visit.counted_edits is None:
            return {**answer, CONTEXT: self._visit.said}
        tokens = answer["input_tokens"]
        whole = {"original_input_tokens": tokens}
        cleared = self._visit.cleared_tokens
        return {**answer, "input_tokens": tokens - cleared, CONTEXT: whole}

    def _in_events(self, body: bytes) -> bytes:
        """The first event of a chat, or of Anthropic's the one that says how an answer ends."""
        lines = body.split(b"\n")
        for number, line in enumerate(lines):
            if self._is_said or not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if event.get("type", "message_delta") == "message_delta":
                event[CONTEXT] = self._visit.said
                lines[number] = b"data: " + json.dumps(event).encode()
                self._is_said = True
        return b"\n".join(lines)
