"""Where the texts of a chat's messages lie among the tokens of its prompt.

A chat template may do anything. So the chat is rendered a second time with a mark in the place of
every text; what stands around the marks must be what stands around the texts, to the last
character, else it is not known where they lie, and the request is refused. No vLLM is needed here.
"""

import copy
import json
import re
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from snapkv.policies.default import MOST_VOTERS
from snapkv.policies.spans import Span
from snapkv_vllm.agents.places import Tokens, tokens_behind
from snapkv_vllm.names import wrong
from snapkv_vllm.spans import NAME, OF_MESSAGES, PROTECT, SpanEdit, require_few

_THINKS, _HAS_THOUGHT = "<think>", "</think>"

_MARK = "[0-9a-f]{16}x[0-9]+x"
"""As `marked` makes them."""

_THOUGHTS = ("reasoning", "reasoning_content")
"""Fields of an assistant's message that hold what it thought."""


@dataclass(frozen=True, kw_only=True)
class MessageText:
    """One text of a message."""

    message: int  # its place in the chat
    text: str
    mark: str  # stands in its place the second time
    is_thought: bool = False


@dataclass(frozen=True)
class Marked:
    """A chat's texts, and the chat with marks in their places."""

    pieces: tuple[MessageText, ...]
    messages: list[Any]


def marked(messages: Sequence[Mapping[str, Any]]) -> Marked:
    """Mark all texts of a chat, but for tool calls and what is empty."""
    pieces: list[MessageText] = []
    marks = secrets.token_hex(8)

    def mark(message: int, text: str, *, is_thought: bool = False) -> str:
        if not text.strip():
            return text
        found = f"{marks}x{len(pieces)}x"
        pieces.append(MessageText(message=message, text=text, mark=found, is_thought=is_thought))
        return found

    copies = []
    for number, message in enumerate(messages):
        own = dict(message)
        for name in _THOUGHTS:
            if isinstance(own.get(name), str):
                own[name] = mark(number, own[name], is_thought=True)
        content = own.get("content")
        if isinstance(content, str):
            own["content"] = _with_thoughts(number, content, own.get("role"), mark)
        elif isinstance(content, list):
            own["content"] = [_part(number, part, mark) for part in content]
        copies.append(own)
    return Marked(tuple(pieces), copies)


def _with_thoughts(number: int, content: str, role: object, mark: Any) -> str:
    thought, end, rest = content.partition(_HAS_THOUGHT)
    if role != "assistant" or not end:
        return str(mark(number, content))
    before, begin, thought = thought.rpartition(_THINKS)
    inner = mark(number, thought, is_thought=True)
    return f"{before}{begin}{inner}{end}{mark(number, rest)}"


def _part(number: int, part: Any, mark: Any) -> Any:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": mark(number, part["text"])}
    return copy.copy(part)


def located(text: str, marked_text: str, pieces: Sequence[MessageText]) -> dict[MessageText, Span]:
    """Where the texts lie in a rendered chat, by characters; not those that it leaves out.

    Raises InvalidArgumentError where a template shows a text otherwise than as it is.
    """
    firsts: dict[str, int] = {}
    for each in re.finditer(_MARK, marked_text):
        firsts.setdefault(each[0], each.start())
    places = {one: firsts[one.mark] for one in pieces if one.mark in firsts}
    shown = sorted(places, key=places.__getitem__)
    found: dict[MessageText, Span] = {}
    at, since = 0, 0
    for number, piece in enumerate(shown):
        at = _behind(text, at, marked_text[since : places[piece]], piece)
        since = places[piece] + len(piece.mark)
        until = places[shown[number + 1]] if number + 1 < len(shown) else len(marked_text)
        follows = marked_text[since:until]
        for own in _as_shown(piece.text):
            if text.startswith(own, at) and text.startswith(follows, at + len(own)):
                break
        else:
            raise _unclear(piece)
        found[piece] = at, at + len(own)
        at += len(own)
    if shown and text[at:] != marked_text[since:]:
        raise _unclear(shown[-1])
    return found


def _behind(text: str, at: int, before: str, piece: MessageText) -> int:
    if not text.startswith(before, at):
        raise _unclear(piece)
    return at + len(before)


def _as_shown(text: str) -> list[str]:
    """How templates show a text: as it is, without white space around it, or as JSON.

    The longest first.
    """
    ways = {text, text.strip(), text.lstrip(), text.rstrip()}
    ways |= {text.strip("\n"), text.lstrip("\n"), text.rstrip("\n")}
    ways |= {json.dumps(text, ensure_ascii=pure)[1:-1] for pure in (False, True)}
    return sorted(ways, key=len, reverse=True)


def _unclear(piece: MessageText) -> Exception:
    shows = "a chat template that shows the texts of messages as they are"
    got = f"another one for message {piece.message}"
    return wrong(NAME, shows, got, "pass spans of tokens")


def question_tokens(
    messages: Sequence[Mapping[str, Any]], text: str, ids: Sequence[int], tokenizer: Any
) -> int | None:
    """How many tokens a chat's prompt has from its question's first one on.

    That is the last text of the last message of a user. None where nobody knows, or where they are
    more than `MOST_VOTERS`.
    """
    contents = (one.get("content") for one in reversed(messages) if one.get("role") == "user")
    content = next(contents, None)
    parts = content if isinstance(content, list) else [{"text": content}]
    said = [part.get("text") for part in reversed(parts) if isinstance(part, Mapping)]
    question = next((one.strip() for one in said if isinstance(one, str) and one.strip()), None)
    place = -1 if question is None else text.rfind(question)
    return None if place < 0 else tokens_behind(tokenizer, text, ids, place, MOST_VOTERS)


@dataclass(frozen=True)
class TokenizedChat:
    """A chat whose texts are known by their tokens.

    Attributes:
        messages: of it, as they were sent.
        found: where the texts lie that the prompt shows, by characters.
        tokens: of the prompt.
    """

    messages: Sequence[Mapping[str, Any]]
    found: Mapping[MessageText, Span]
    tokens: Tokens

    def texts(
        self, message: int, *, thoughts: bool | None = None, whole: bool = False
    ) -> list[Span]:
        """The spans of tokens of a message's texts, ascending: all, or thoughts, or all others.

        `whole` adds tokens that the texts share with what stands around them.
        """
        reach = self.tokens.around if whole else self.tokens.inside
        return [
            reach(span)
            for piece, span in self._of_messages[message]
            if thoughts in (None, piece.is_thought) and reach(span)[0] < reach(span)[1]
        ]

    @cached_property
    def _of_messages(self) -> Mapping[int, Sequence[tuple[MessageText, Span]]]:
        """The texts of each message; a chat can have as many messages as it has tokens."""
        found = defaultdict[int, list[tuple[MessageText, Span]]](list)
        for piece, span in self.found.items():
            found[piece.message].append((piece, span))
        return found

    @cached_property
    def _alike(self) -> Mapping[tuple[str, str | int], set[int]]:
        """By a field and its value, the messages that have it; by an index from both ends."""
        found = defaultdict[tuple[str, str | int], set[int]](set)
        for number, message in enumerate(self.messages):
            for name in OF_MESSAGES:
                value = message.get(name)
                if isinstance(value, str):
                    found[name, value].add(number)
            for index in (number, number - len(self.messages)):
                found["index", index].add(number)
        return found

    def like(self, fields: Sequence[tuple[str, str | int]]) -> list[int]:
        """The messages that have all these values, ascending."""
        return sorted(set.intersection(*(self._alike.get(one, set()) for one in fields)))


def spans_of(entries: Sequence[SpanEdit], chat: TokenizedChat) -> list[SpanEdit]:
    """The entries by spans of tokens, those that name messages over each of their texts.

    Raises InvalidArgumentError where no message is like an entry says.
    """
    resolved = []
    for entry in dict.fromkeys(entries):  # the same one again says nothing more
        if entry.span is not None:
            resolved.append(entry)
            continue
        chosen = chat.like(entry.messages)
        if not chosen:
            like = ", ".join(f"{name} {value!r:.60}" for name, value in entry.messages)
            raise wrong(NAME, f"a message with {like}", "none", "leave it out, or name another")
        whole = entry.do == PROTECT
        spans = [span for number in chosen for span in chat.texts(number, whole=whole)]
        resolved += [entry.placed(span) for span in spans]
        require_few(resolved)
    return resolved
