"""Bodies of requests that name a document: its tokens, then the question's.

vLLM is given token ids, which begin with the document's own; nothing else of a request changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeGuard

from snapkv_vllm.documents.catalogue import SharedDocument
from snapkv_vllm.documents.refused import RefusedError
from snapkv_vllm.names import DOCUMENT, PREFIX, XARGS, shown

ENDPOINTS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
"""Where requests may name a document, and the field that it is the beginning of."""

_BEGINNINGS = ("0", "Yes", "\n\nYes", "  Yes")
"""Of questions. No template renders them alike, and spaces may grow into a token before them."""

_MOST_TOGETHER = 1 << 20
"""Tokens of documents before the questions of one request, which a few bytes ask for."""

_WITHOUT = {
    "prompt_logprobs": "its probabilities were not computed with this request",
    "prompt_embeds": "its tokens come before the request's",
    "truncate_prompt_tokens": "its tokens must all be there",
    "kv_transfer_params": "its keys and values are on this server",
}
"""Fields that a document's request cannot have, and why."""


class Prompts(Protocol):
    """Makes tokens of texts and chats as the server itself does."""

    def is_base_model(self, name: str) -> bool:
        """Whether a name stands for the model itself, and for no adapter."""

    async def tokenize(self, prompt: str | list[int], *, special_tokens: bool) -> list[int]:
        """The tokens of a text, or given ones once they are checked.

        Raises:
            RefusedError: with the server's own words.
        """

    async def render(self, body: Mapping[str, Any]) -> list[int] | None:
        """The tokens of what a chat's body says; None for one that the server itself refuses.

        Raises:
            RefusedError: with the server's own words.
        """


async def ids_of_text(prompt: object, prompts: Prompts) -> tuple[int, ...]:
    """What a document of plain text begins prompts with.

    Args:
        prompt: a text, or its token ids.
        prompts: makes tokens.

    Raises:
        RefusedError: an empty one, one of another kind, or a tokenizer with tokens for the end.
    """
    if not _is_one_prompt(prompt):
        _refuse("prompt", "a text or its token ids", prompt, "pass the document's text")
    if isinstance(prompt, list):
        return tuple(await prompts.tokenize(prompt, special_tokens=False))
    ids = await prompts.tokenize(prompt, special_tokens=True)
    bare = await prompts.tokenize(prompt, special_tokens=False)
    if not bare or ids[-len(bare) :] != bare:
        raise RefusedError(
            f"prompt: expected a text whose tokens questions can follow, got one whose last of "
            f"{len(ids)} tokens says that it ends; pass its token ids without that one"
        )
    return tuple(ids)


async def ids_of_messages(messages: object, prompts: Prompts) -> tuple[int, ...]:
    """What a document of messages begins chats with: what their renderings have in common.

    Args:
        messages: a list of them, texts alone.
        prompts: renders.

    Raises:
        RefusedError: none, one that is no text, or a template that puts none of them first.
    """
    if not isinstance(messages, list) or not messages or not all(map(_is_text, messages)):
        _refuse("messages", "a list of messages of text", messages, "pass the document's text")
    renderings = []
    for beginning in _BEGINNINGS:
        question = {"role": "user", "content": beginning}
        ids = await prompts.render({"messages": [*messages, question]})
        if ids is None:
            _refuse("messages", "messages as chats have them", messages, "pass role and content")
        renderings.append(ids)
    found = common_prefix(renderings)
    if not found:
        _refuse("messages", "a chat template that puts them first", messages, "pass a prompt")
    return tuple(found)


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The longest beginning that all of them share."""
    found = []
    for ids in zip(*sequences, strict=False):
        if len(set(ids)) > 1:
            break
        found.append(ids[0])
    return found


def document_of(body: object, path: str) -> str | None:
    """The name of the document that a body names; None where it names none.

    Args:
        body: from JSON, its settings checked.
        path: of the endpoint.

    Raises:
        RefusedError: it names one where nobody looks for it.
    """
    if not isinstance(body, dict):
        return None
    field = PREFIX + DOCUMENT
    sampling = body.get("sampling_params")
    beside = sampling.get("extra_args") if isinstance(sampling, dict) else None
    named = [one for one in (body.get(XARGS), beside) if isinstance(one, dict) and field in one]
    if not named:
        return None
    if path not in ENDPOINTS or named != [body.get(XARGS)]:
        raise RefusedError(
            f"{field}: expected inside {XARGS} at {' or '.join(ENDPOINTS)}, got it in a request to "
            f"{shown(path)}; send the request there, or leave it out"
        )
    return str(named[0][field])


async def rewritten(
    body: Mapping[str, Any], path: str, document: SharedDocument, prompts: Prompts
) -> dict[str, Any]:
    """The body that goes on to vLLM; its document has the engine's id, and the prompt begins so.

    Args:
        body: that names the document.
        path: one of `ENDPOINTS`.
        document: the named one.
        prompts: makes tokens of the question.

    Raises:
        RefusedError: a document of another kind, no question, or something that cannot be joined.
    """
    field = ENDPOINTS[path]
    if document.kind != field:
        right = next(one for one, kind in ENDPOINTS.items() if kind == document.kind)
        raise RefusedError(
            f"{PREFIX}{DOCUMENT}: expected a document of {field} at {path}, got one of "
            f"{document.kind}; send the request to {right}, or register the document as {field}"
        )
    _require_joinable(body, prompts)
    given = {**body[XARGS], PREFIX + DOCUMENT: document.document_id}
    join = _with_prompts if field == "prompt" else _with_messages
    return {**body, **await join(body, document, prompts), XARGS: given}


async def _with_prompts(
    body: Mapping[str, Any], document: SharedDocument, prompts: Prompts
) -> dict[str, Any]:
    prompt = body.get("prompt")
    questions = [prompt] if _is_one_prompt(prompt) else prompt
    if not isinstance(questions, list) or not questions or not all(map(_is_one_prompt, questions)):
        _refuse("prompt", "a question behind the document", prompt, "pass a text or its token ids")
    begins, asks = len(document.token_ids), len(questions)
    if asks > 1 and asks * begins > _MOST_TOGETHER:
        raise RefusedError(
            f"prompt: expected at most {max(1, _MOST_TOGETHER // begins):,} questions at once, of "
            f"which each begins with the document's {begins:,} tokens, got {asks:,}; send several "
            "requests"
        )
    asked = [await prompts.tokenize(one, special_tokens=False) for one in questions]
    if not all(asked):
        _refuse("prompt", "a question behind the document", prompt, "pass one that has tokens")
    return {"prompt": [[*document.token_ids, *ids] for ids in asked]}


async def _with_messages(
    body: Mapping[str, Any], document: SharedDocument, prompts: Prompts
) -> dict[str, Any]:
    """The document's messages in front, and the tokens of it all, so that vLLM need not render."""
    messages = body.get("messages")
    if not messages or not isinstance(messages, list):
        _refuse("messages", "a question behind the document", messages, "pass a list of messages")
    joined = {"messages": [*(document.messages or ()), *messages]}
    ids = await prompts.render({**body, **joined})
    if ids is None:
        return joined
    begins = len(document.token_ids)
    if tuple(ids[:begins]) != document.token_ids:
        raise RefusedError(
            f"messages: expected a chat whose first {begins} tokens are the document's, got one in "
            "which the chat template puts others there; ask as user, without what changes the "
            "template's beginning (tools, chat_template_kwargs), or register the document again"
        )
    if body.get("return_prompt_text"):
        return joined
    return joined | {"kv_transfer_params": {"prompt_token_ids": ids}}


def _require_joinable(body: Mapping[str, Any], prompts: Prompts) -> None:
    for name, why in _WITHOUT.items():
        if body.get(name) is not None:
            _refuse(name, f"none with a document, since {why}", body[name], "leave it out")
    if body.get("echo") and (body.get("logprobs") or body.get("top_logprobs")):
        _refuse("echo", "none with a document and logprobs", True, "leave one of them out")
    require_base_model(body, prompts)


def require_base_model(body: Mapping[str, Any], prompts: Prompts) -> None:
    """Raise where a body names something else than the model that reads documents.

    Raises:
        RefusedError: an adapter, or no model of the server's.
    """
    model = body.get("model")
    if isinstance(model, str) and model and not prompts.is_base_model(model):
        _refuse("model", "the model that reads documents", model, "ask without an adapter")


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


def _refuse(name: str, expected: str, got: object, remedy: str) -> NoReturn:
    said = f"'{shown(got)}'" if isinstance(got, str) else f"a value of type {type(got).__name__}"
    raise RefusedError(f"{name}: expected {expected}, got {said}; {remedy}")
