"""Tokens of documents, and of requests after them, by vLLM's own renderer and in its words.

vLLM is given token ids, which begin with the document's own; nothing else of a request changes.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, TypeGuard

from snapkv.errors import InvalidArgumentError
from snapkv_vllm.agents.messages import marked
from snapkv_vllm.compatibility import require_compatible
from snapkv_vllm.documents.catalogue import LIBRARY, SharedDocument
from snapkv_vllm.documents.content import chat_spelt_out, spelt_out
from snapkv_vllm.documents.protocol import DOCUMENT
from snapkv_vllm.names import ENDPOINTS, XARGS, RefusedError, shown, wrong

_BEGINNINGS = ("0", "Yes", "\n\nYes", "  Yes")
"""Of questions. No template renders them alike, and spaces may grow into a token before them."""

_MOST_TOGETHER = 1 << 20
"""Tokens of documents before the questions of one request, which a few bytes ask for."""

Render = Callable[..., Awaitable[Any]]
"""A method of vLLM's renderer, which makes the engine's inputs of a request, or an error."""


class Prompts:
    """Makes tokens as the server itself does; `state` is that of its FastAPI application."""

    def __init__(self, state: Any) -> None:
        self._renderer = state.online_renderer
        self._models = state.openai_serving_models
        self._render_chat: Render = state.online_renderer.render_chat

    @property
    def tokenizer(self) -> Any:
        return self._renderer.renderer.get_tokenizer()

    # As the server makes them.

    def is_base_model(self, name: str) -> bool:
        """Whether a name stands for the model itself, and for no adapter."""
        return bool(self._models.is_base_model(name))

    async def tokenize(self, prompt: str | list[int], *, special_tokens: bool) -> list[int]:
        """The tokens of a text, or given ones once they are checked: not more than are served."""
        from pydantic import ValidationError
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        given: dict[str, Any] = {"max_tokens": 1, "add_special_tokens": special_tokens}
        try:
            request = CompletionRequest(prompt=prompt, **given)
        except ValidationError:
            raise _unfit("prompt", "a text, or token ids from 0 on", prompt) from None
        with _as_refused():
            if isinstance(prompt, list) and hasattr(self._renderer.renderer, "validate_token_ids"):
                self._renderer.renderer.validate_token_ids(prompt, parameter="prompt")
            (made,) = await self._renderer.preprocess_completion(
                request, prompt_input=prompt, prompt_embeds=None, skip_mm_cache=True
            )
        return list(made["prompt_token_ids"])

    async def render(self, messages: Sequence[Any]) -> tuple[str | None, list[int]]:
        """What the chat template makes of messages: the text, if vLLM says it, and its tokens."""
        from pydantic import ValidationError
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        try:
            request = ChatCompletionRequest(messages=copy.deepcopy(messages))
        except ValidationError:
            raise _unfit("messages", "messages as chats have them", messages) from None
        with _as_refused():
            made = await self._render_chat(request, skip_mm_cache=True)
        if isinstance(made, ErrorResponse):
            raise RefusedError(made.error.message, made.error.code)
        _, (engine_input,) = made
        return engine_input.get("prompt"), _ids_of_chat(made)

    # Of documents.

    async def ids_of_text(self, prompt: object) -> tuple[int, ...]:
        """What a document of plain text, or of token ids, begins prompts with.

        Control words in a text are spelt out; whoever sends ids means them.
        """
        if not _is_one_prompt(prompt):
            raise _unfit("prompt", "a text or its token ids", prompt)
        if isinstance(prompt, list):
            return tuple(await self.tokenize(prompt, special_tokens=False))
        ids = await self.tokenize(prompt, special_tokens=True)
        bare = await self.tokenize(prompt, special_tokens=False)
        if not bare or ids[-len(bare) :] != bare:
            ends = f"one whose last of {len(ids)} tokens says that it ends"
            remedy = "pass its token ids without that one"
            raise wrong("prompt", "a text whose tokens questions can follow", ends, remedy)
        begins = len(ids) - len(bare)
        return (*ids[:begins], *spelt_out(self.tokenizer, bare))

    async def ids_of_messages(self, messages: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What a document of messages begins chats with: what their renderings have in common.

        Returns:
            It as vLLM renders it, and with the control words of the texts spelt out.
        """
        if not isinstance(messages, list) or not messages or not all(map(_is_text, messages)):
            raise _unfit("messages", "a list of messages of text", messages)
        questions = [{"role": "user", "content": beginning} for beginning in _BEGINNINGS]
        renderings = [await self.render([*messages, question]) for question in questions]
        found = _common_beginning([ids for _, ids in renderings])
        if not found:
            raise _unfit("messages", "a chat template that puts them first", messages)
        marks = marked([*messages, questions[0]])
        with_marks = await self.render(marks.messages)
        told = self.tokenizer, renderings[0], with_marks, marks
        spelt = await asyncio.to_thread(chat_spelt_out, *told)
        behind = len(renderings[0][1]) - len(found)
        return tuple(found), tuple(spelt[: len(spelt) - behind])

    # Of requests.

    async def render_after(
        self, document: SharedDocument, request: Any, kind: str, render: Render
    ) -> Any:
        """What vLLM renders of a request, which names a document, with its tokens in front."""
        if document.kind not in (kind, LIBRARY):
            right = next(path for path, field in ENDPOINTS.items() if field == document.kind)
            remedy = f"send the request to {right}, or register the document as {kind}"
            raise wrong(DOCUMENT, f"a document of {kind}", f"one of {document.kind}", remedy)
        require_compatible(given={DOCUMENT: document.name}, request=request)
        setattr(request, XARGS, {**getattr(request, XARGS), DOCUMENT: document.document_id})
        if kind == "prompt":
            request.prompt = await self._prompts_after(document.prefix.token_ids, request.prompt)
            return await render(request)
        return await self._chat_after(document, request, render)

    async def _prompts_after(self, begins: Sequence[int], prompt: object) -> list[list[int]]:
        questions = [prompt] if _is_one_prompt(prompt) else prompt
        expected = "a question after the document"
        if not isinstance(questions, list) or not questions:
            raise _unfit("prompt", expected, prompt)
        if not all(map(_is_one_prompt, questions)):
            raise _unfit("prompt", expected, prompt)
        tokens, asks = len(begins), len(questions)
        if asks > 1 and asks * tokens > _MOST_TOGETHER:
            most = f"at most {max(1, _MOST_TOGETHER // tokens):,} questions at once"
            each = f"of which each begins with the document's {tokens:,} tokens"
            raise wrong("prompt", f"{most}, {each}", f"{asks:,}", "send several requests")
        asked = [await self.tokenize(one, special_tokens=False) for one in questions]
        if not all(asked):
            raise _unfit("prompt", expected, prompt)
        return [[*begins, *ids] for ids in asked]

    async def _chat_after(self, document: SharedDocument, request: Any, render: Render) -> Any:
        """A chat with the document before it, or before what the user says first."""
        if not request.messages:
            raise _unfit("messages", "a question after the document", request.messages)
        if document.messages is not None:
            own = type(request)(messages=copy.deepcopy(document.messages)).messages
            request.messages = [*own, *request.messages]
        made = await render(request)
        if isinstance(made, tuple):  # and no error of vLLM's
            ids, rendered = _ids_of_chat(made), document.rendered_ids
            _require_begins(ids, rendered)
            _, (engine_input,) = made
            engine_input["prompt_token_ids"] = [*document.prefix.token_ids, *ids[len(rendered) :]]
        return made


@contextmanager
def _as_refused() -> Iterator[None]:
    """Turn what vLLM raises into what its endpoints answer then."""
    try:
        yield
    except Exception as error:
        from vllm.entrypoints.serve import create_error_response

        said = create_error_response(error).error
        raise RefusedError(said.message, said.code) from error


def _ids_of_chat(made: Any) -> list[int]:
    """Of a rendered chat: its messages, and what goes to the engine."""
    _, (engine_input,) = made
    if engine_input["type"] != "token":
        got = f"{engine_input['type']} input"
        raise wrong("messages", "text alone with a document", got, "leave it out")
    return list(engine_input["prompt_token_ids"])


def _common_beginning(renderings: Sequence[Sequence[int]]) -> list[int]:
    at_once = zip(*renderings, strict=False)
    return [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, at_once)]


def _require_begins(ids: Sequence[int], rendered: tuple[int, ...]) -> None:
    begins = len(rendered)
    if tuple(ids[:begins]) != rendered:
        raise wrong(
            "messages",
            f"a chat whose first {begins} tokens are the document's",
            "one in which the chat template puts others there",
            "ask as user, without what changes the template's beginning (system messages, tools, "
            "chat_template_kwargs), or register the document again",
        )


def _is_one_prompt(prompt: object) -> TypeGuard[str | list[int]]:
    """Whether it is a text or token ids, and not empty."""
    if isinstance(prompt, list):
        return bool(prompt) and all(type(one) is int for one in prompt)
    return isinstance(prompt, str) and bool(prompt)


def _is_text(message: object) -> bool:
    content = message.get("content") if isinstance(message, dict) else 0
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def _unfit(name: str, expected: str, got: object) -> InvalidArgumentError:
    said = f"'{shown(got)}'" if isinstance(got, str) else f"a value of type {type(got).__name__}"
    return wrong(name, expected, said, "pass a text")
