"""Edits of a chat's context, as Anthropic's `context_management` names them.

The client sends its whole history; what an edit clears keeps no keys and values when the prompt has
been read. Neither torch nor vLLM is needed here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from snapkv.policies.spans import Span, Spans
from snapkv.validation import require_int
from snapkv_vllm.agents.messages import TokenizedChat
from snapkv_vllm.names import CONTEXT, require_readable, shown, wrong

_MOST = 8
_LONGEST = 20_000


def _results(chat: TokenizedChat) -> dict[int, str]:
    """Messages that hold results, and of which tool; "" where it is not said."""
    calls = [call for one in chat.messages for call in _calls(one)]
    by_id = {call.get("id"): _mapping(call.get("function")).get("name") for call in calls}
    return {
        number: str(one.get("name") or by_id.get(one.get("tool_call_id")) or "")
        for number, one in enumerate(chat.messages)
        if one.get("role") == "tool"
    }


def _thoughts(chat: TokenizedChat) -> list[list[Span]]:
    """By turns that have some."""
    turns = [chat.texts(number, thoughts=True) for number in range(len(chat.messages))]
    return [spans for spans in turns if spans]


def _calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls") or ()
    return [call for call in calls if isinstance(call, Mapping)]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, kw_only=True)
class ClearToolUses:
    """Clears the results of tools but for the last ones, once a chat is long."""

    type: ClassVar[str] = "clear_tool_uses_20250919"

    trigger: tuple[str, int] = ("input_tokens", 100_000)  # or "tool_uses"; cleared beyond it
    keep: int = 3
    at_least: int = 0  # tokens that must be cleared together, or none are
    exclude: tuple[str, ...] = ()  # tools whose results stay

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ClearToolUses":
        known = ("type", "trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs")
        _require_fields(given, known)
        if given.get("clear_tool_inputs"):
            raise wrong(f"{CONTEXT}: clear_tool_inputs", "false", "true", "leave it out")
        exclude = given.get("exclude_tools") or []
        if not isinstance(exclude, list) or not all(isinstance(one, str) for one in exclude):
            raise wrong(f"{CONTEXT}: exclude_tools", "a list of names", "other", "pass one")
        tokens = ("input_tokens",)
        at_least = _amount(given, "clear_at_least", tokens, ("input_tokens", 0))[1]
        return cls(
            trigger=_amount(given, "trigger", (*tokens, "tool_uses"), cls.trigger),
            keep=_amount(given, "keep", ("tool_uses",), ("tool_uses", cls.keep))[1],
            at_least=at_least,
            exclude=tuple(exclude),
        )

    def ever(self, chat: TokenizedChat) -> list[Span]:
        """Spans of tokens that it may clear, now or when the chat has gone on."""
        return [
            span
            for number, tool in _results(chat).items()
            if tool not in self.exclude
            for span in chat.texts(number, thoughts=False)
        ]

    def clears(self, chat: TokenizedChat) -> tuple[list[Span], dict[str, int]]:
        """Spans of tokens, and what is said of them; none where nothing is cleared."""
        results = _results(chat)
        amounts = {"input_tokens": len(chat.tokens.starts), "tool_uses": len(results)}
        kind, most = self.trigger
        if amounts[kind] <= most:
            return [], {}
        older = list(results.items())[: max(0, len(results) - self.keep)]
        cleared = [
            spans
            for number, tool in older
            if tool not in self.exclude and (spans := chat.texts(number, thoughts=False))
        ]
        spans = [span for of_message in cleared for span in of_message]
        tokens = _tokens(spans)
        if not tokens or tokens < self.at_least:
            return [], {}
        return spans, {"cleared_tool_uses": len(cleared), "cleared_input_tokens": tokens}


@dataclass(frozen=True, kw_only=True)
class ClearThinking:
    """Clears what the assistant thought, but for its last turns with thoughts."""

    type: ClassVar[str] = "clear_thinking_20251015"

    keep: int | None = 1  # None clears nothing

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ClearThinking":
        _require_fields(given, ("type", "keep"))
        if given.get("keep") in ("all", {"type": "all"}):
            return cls(keep=None)
        kept = _amount(given, "keep", ("thinking_turns",), ("thinking_turns", 1))[1]
        if not kept:
            raise wrong(f"{CONTEXT}: keep", "at least 1 of thinking_turns", kept, "raise it")
        return cls(keep=kept)

    def ever(self, chat: TokenizedChat) -> list[Span]:
        """As that of `ClearToolUses`."""
        return [] if self.keep is None else [one for turn in _thoughts(chat) for one in turn]

    def clears(self, chat: TokenizedChat) -> tuple[list[Span], dict[str, int]]:
        """As that of `ClearToolUses`."""
        turns = _thoughts(chat)
        older = [] if self.keep is None else turns[: max(0, len(turns) - self.keep)]
        spans = [span for of_turn in older for span in of_turn]
        if not spans:
            return [], {}
        said = {"cleared_thinking_turns": len(older), "cleared_input_tokens": _tokens(spans)}
        return spans, said


Edit = ClearToolUses | ClearThinking

_KINDS: dict[str, type[Edit]] = {kind.type: kind for kind in (ClearToolUses, ClearThinking)}


def edits_of(given: object) -> tuple[Edit, ...]:
    """What `context_management` says: an object, or one as JSON.

    Raises:
        InvalidArgumentError: what is no such object, or a wrong value.
        InvalidTypeError: a value of the wrong type.
    """
    if isinstance(given, str) and len(given) <= _LONGEST:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise wrong(CONTEXT, "an object with edits", "what is no JSON", "pass one") from None
    if not isinstance(given, Mapping) or not isinstance(edits := given.get("edits"), list):
        example = f'{{"edits": [{{"type": "{ClearToolUses.type}"}}]}}'
        raise wrong(CONTEXT, f"an object such as {example}", "another value", "pass one")
    if len(edits) > _MOST:
        raise wrong(CONTEXT, f"at most {_MOST} edits", len(edits), "pass fewer")
    return tuple(_edit(one) for one in edits)


def _edit(given: object) -> Edit:
    kind = _mapping(given).get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        got = f"'{shown(kind)}'" if isinstance(kind, str) else "none"
        raise wrong(f"{CONTEXT}: type", f"one of {', '.join(_KINDS)}", got, "pass one of them")
    return _KINDS[kind].of(_mapping(given))


def _require_fields(given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise wrong(CONTEXT, f"fields among {', '.join(known)}", shown(name), "leave it out")


def _amount(
    given: Mapping[str, Any], name: str, kinds: Sequence[str], default: tuple[str, int]
) -> tuple[str, int]:
    """A number of things, as ``{"type": "tool_uses", "value": 3}``."""
    if (amount := given.get(name)) is None:
        return default
    kind, value = _mapping(amount).get("type"), _mapping(amount).get("value")
    if kind not in kinds:
        expected = f'{{"type": "{kinds[0]}", "value": a number}}'
        raise wrong(f"{CONTEXT}: {name}", expected, "another value", "pass it so")
    require_readable(f"{CONTEXT}: {name}", value)
    require_int(f"{CONTEXT}: {name}", value, minimum=0)
    return str(kind), int(str(value))


@dataclass(frozen=True)
class Applied:
    """What edits do to a chat.

    Attributes:
        cleared: spans of tokens that go.
        whole: those that may go later.
        said: in the response.
    """

    cleared: Spans
    whole: Spans
    said: dict[str, Any]


def applied(edits: Sequence[Edit], chat: TokenizedChat) -> Applied:
    """What edits clear of a chat as it is now."""
    spans, ever = list[Span](), list[Span]()
    said: list[dict[str, Any]] = []
    for edit in edits:
        cleared, amounts = edit.clears(chat)
        ever += edit.ever(chat)
        if cleared:
            spans += cleared
            said.append({"type": edit.type, **amounts})
    gone = Spans.of(CONTEXT, spans)
    return Applied(gone, Spans.of(CONTEXT, ever).without(gone), {"applied_edits": said})


def _tokens(spans: Sequence[Span]) -> int:
    return sum(end - start for start, end in spans)
