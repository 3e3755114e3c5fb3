"""From documents and a question to the text the model continues."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

from snapkv.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The text that a model continues."""

    text: str
    answer_start: str = ""
    has_special_tokens: bool = False
    context_characters: int | None = None
    system_characters: int = 0

    def token_ids(self, tokenizer: Any) -> Any:
        """The prompt as token ids, (1, T) int64."""
        return self.encoded(tokenizer, self.text, return_tensors="pt")["input_ids"]

    def context_tokens(self, tokenizer: Any) -> int | None:
        """How many of the prompt's tokens are context; None where `context_characters` is."""
        if self.context_characters is None:
            return None
        whole = self.encoded(tokenizer, self.text)["input_ids"]
        context = self.encoded(tokenizer, self.text[: self.context_characters])["input_ids"]
        pairs = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(whole, context, strict=False)
        )
        tokens = sum(1 for _ in pairs)
        if tokens == 0:
            raise InvalidArgumentError(
                "context: expected text before a question that is hidden, got no token of it; "
                "add a document, or let the question vote"
            )
        if tokens == len(whole):
            raise InvalidArgumentError(
                "question: expected text behind the context that it is hidden from, got no token "
                "of it; add a question, or leave context_characters out"
            )
        return tokens

    def hiding(self, question: str) -> "Prompt":
        """The same prompt, compressed before the question; what stands behind it is hidden, too."""
        asked = self.text.removesuffix(self.answer_start)
        question = question.strip()
        place = asked.rfind(question)
        if not question or place < 0:
            raise InvalidArgumentError(
                f"question: expected to find it in the prompt to hide it, got a template that "
                f"rewrites {question[:40]!r}; use the template none, or let the question vote"
            )
        return replace(self, context_characters=place)

    def encoded(self, tokenizer: Any, text: str, **options: Any) -> Any:
        """What the tokenizer makes of a beginning of the text, special tokens as in all of it."""
        return tokenizer(
            text,
            add_special_tokens=not self.has_special_tokens,
            verbose=False,  # the length is checked against the model, with a better message
            **options,
        )


def question_prompt(
    tokenizer: Any, document: str, question: str, *, answer_start: str = ""
) -> Prompt:
    """The document first and the question last, where it can vote on the document."""
    if tokenizer.chat_template:
        return chat_prompt(tokenizer, f"{document}\n\n{question}", answer_start=answer_start)
    text = f"{document}\n\nQuestion: {question}\nAnswer:"
    if answer_start:
        text += f" {answer_start}"
    return Prompt(text=text, answer_start=answer_start)


def text_prompt(tokenizer: Any, text: str, *, answer_start: str = "") -> Prompt:
    """The text itself, to be continued."""
    del tokenizer
    return Prompt(text=text + answer_start, answer_start=answer_start)


def chat_prompt(tokenizer: Any, text: str, *, answer_start: str = "") -> Prompt:
    """One message of the user, up to the point where the model's turn begins."""
    if not tokenizer.chat_template:
        raise InvalidArgumentError(
            "chat: expected a model with a chat template, got one without; leave chat out"
        )
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return Prompt(
        text=turn + answer_start,
        answer_start=answer_start,
        has_special_tokens=True,
        system_characters=len(_system_message(tokenizer)),
    )


def next_turn(tokenizer: Any, question: str) -> str:
    """What stands between the end of an answer and the beginning of the next one."""
    if not tokenizer.chat_template:
        return f"\n\nQuestion: {question}\nAnswer:"
    turns = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": question},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    _, found, behind = text.partition(_ANSWER)
    if not found:
        raise InvalidArgumentError(
            "chat: expected a chat template that repeats earlier answers, got one that does not; "
            "ask every question by itself"
        )
    return str(behind)


_ANSWER = "the-answer-so-far"


def _system_message(tokenizer: Any) -> str:
    """What a chat template writes before the first message and not before a later one."""
    turns = [
        {"role": "user", "content": _ANSWER},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _ANSWER},
    ]
    parts = tokenizer.apply_chat_template(turns, tokenize=False).split(_ANSWER)
    if len(parts) < 3 or not getattr(tokenizer, "is_fast", False):
        return ""  # a template that rewrites messages, or tokens that do not tell where they stand
    first = tokenizer(parts[0], add_special_tokens=False, return_offsets_mapping=True)
    ids, later = first["input_ids"], tokenizer(parts[-2], add_special_tokens=False)["input_ids"]
    pairs = zip(reversed(ids), reversed(later), strict=False)
    header = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    own = ids[: len(ids) - header]
    if not tokenizer.decode(own, skip_special_tokens=True).strip():
        return ""
    message: str = parts[0][: first["offset_mapping"][len(own) - 1][1]]
    return message
