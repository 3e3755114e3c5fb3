"""Messages of a conversation: read from a file, written by a chat template, found in its tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from snapkv.app.parts import ROLES, Part, tokens_between
from snapkv.app.prompts import Prompt, system_message
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_choice

MOST_BYTES = 64 * 2**20
"""Of a file with a transcript."""

MOST_MESSAGES = 2000
"""Of a transcript, which the template writes once up to each of them."""


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """Messages as OpenAI's chat completions have them, and the tools that they call."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Of a JSON file: a list of messages, or an object with `messages` and `tools`.

        Raises:
            InvalidArgumentError: the file cannot be read, or holds something else.
        """
        try:
            if Path(path).stat().st_size > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES:,} bytes")
            found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
            json.dumps(found, ensure_ascii=False).encode()  # no half of a surrogate pair
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InvalidArgumentError(
                f"transcript: expected a JSON file of messages, got {str(path)!r}: {reason}; pass "
                'for instance [{"role": "user", "content": "Hello"}]'
            ) from error
        if isinstance(found, dict):
            return cls.of(found.get("messages", found), found.get("tools") or [])
        return cls.of(found)

    @classmethod
    def of(cls, messages: Any, tools: Any = ()) -> Self:
        """Of such lists, checked."""
        if not isinstance(messages, list) or not messages:
            raise InvalidArgumentError(
                f"transcript: expected a list of messages, got {messages!r:.60}; pass for instance "
                '[{"role": "user", "content": "Hello"}]'
            )
        if len(messages) > MOST_MESSAGES:
            raise InvalidArgumentError(
                f"transcript: expected at most {MOST_MESSAGES:,} messages, got {len(messages):,}; "
                "leave the oldest out"
            )
        if not isinstance(tools, list | tuple):
            raise InvalidArgumentError(
                f"transcript, tools: expected a list, got {tools!r:.60}; pass them as chat "
                "completions have them"
            )
        return cls(messages=tuple(map(_message, messages)), tools=tuple(tools))

    def asking(self, question: str) -> Self:
        """With a question of the user behind it."""
        asked = {"role": "user", "content": question}
        return replace(self, messages=(*self.messages, asked))

    def prompt(self, tokenizer: Any) -> tuple[Prompt, list[Part]]:
        """The text that the model continues, and where each message stands in its tokens.

        Tool calls that the template does not write stand in the message's text.
        """
        if not tokenizer.chat_template:
            raise InvalidArgumentError(
                "transcript: expected a model with a chat template, got one without; leave it out"
            )
        messages: Sequence[dict[str, Any]] = self.messages
        if not self._writes_calls(tokenizer):
            messages = [_with_calls(message) for message in messages]
        text = self._written(tokenizer, messages, add_generation_prompt=True)
        prompt = Prompt(
            text=text,
            has_special_tokens=True,
            system_characters=self._system_characters(tokenizer, messages),
        )
        return prompt, list(self._parts(tokenizer, messages, prompt))

    def _system_characters(self, tokenizer: Any, messages: Sequence[dict[str, Any]]) -> int:
        if messages[0]["role"] != "system":
            return len(system_message(tokenizer))
        return len(self._begun(tokenizer, messages[:1]) or "")

    def _parts(
        self, tokenizer: Any, messages: Sequence[dict[str, Any]], prompt: Prompt
    ) -> Iterator[Part]:
        offsets = prompt.offsets(tokenizer, "transcript", "choose a model with a fast one")
        start = 0
        if messages[0]["role"] != "system" and prompt.system_characters:
            start = prompt.system_characters
            yield Part(role="system", span=tokens_between(offsets, 0, start))
        for number, message in enumerate(messages, 1):
            begun = self._begun(tokenizer, messages[:number])
            if begun is None or not prompt.text.startswith(begun):
                start, stop = _found(prompt.text, str(message["content"]), start)
            else:
                stop = len(begun)
            yield Part(role=message["role"], span=tokens_between(offsets, start, stop))
            start = stop

    def _begun(self, tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str | None:
        """The text of the first messages; None where they are no text by themselves."""
        try:
            return self._written(tokenizer, messages)
        except InvalidArgumentError:
            return None

    def _writes_calls(self, tokenizer: Any) -> bool:
        """Whether the template's text says which tools were called."""
        bare = [{**message, "tool_calls": []} for message in self.messages]
        return self._written(tokenizer, self.messages) != self._begun(tokenizer, bare)

    def _written(self, tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        tools: Any = list(self.tools) or None
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, **options
            )
        except Exception as error:  # a template is a program of the model's maker
            raise InvalidArgumentError(
                f"transcript: expected messages that the model's chat template takes, got: "
                f"{error}; change their roles or their order"
            ) from error
        return str(text)


def _message(given: Any) -> dict[str, Any]:
    """A message as templates take it: its content a text, the arguments of its calls no text."""
    if not isinstance(given, dict):
        raise InvalidArgumentError(
            f"transcript: expected messages with a role and a content, got {given!r:.60}; pass "
            'for instance {"role": "user", "content": "Hello"}'
        )
    role = "system" if given.get("role") == "developer" else given.get("role")
    require_choice("transcript, role", role, ROLES[:4])
    content = given.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if is_text else content
    content = "" if content is None else content
    if not isinstance(content, str):
        raise InvalidArgumentError(
            f"transcript: expected a text as content, got {content!r:.60}; leave pictures out"
        )
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise InvalidArgumentError(
            f"transcript: expected tool calls with a function each, got {calls!r:.60}; pass them "
            "as chat completions have them"
        )
    made = {**given, "role": role, "content": content}
    if calls:
        made["tool_calls"] = [_call(call) for call in calls]
    return made


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are no text any more."""
    function, arguments = call["function"], call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
    return {**call, "function": {**function, "arguments": arguments}}


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls in its text."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    told = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    return (
        {**message, "content": "\n".join([message["content"], *told]).strip()} if told else message
    )


def _found(text: str, content: str, start: int) -> tuple[int, int]:
    """Where a message stands that a template writes otherwise when others follow."""
    place = text.find(content.strip(), start)
    if not content.strip() or place < 0:
        return start, start
    return place, place + len(content.strip())
