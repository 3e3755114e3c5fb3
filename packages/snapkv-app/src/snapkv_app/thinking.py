"""Where a model thought before it answered, by the marks that its family writes."""

import re
from collections.abc import Sequence
from typing import Any

from snapkv.policies.spans import Span
from snapkv_app.protection import tokens_of

MARKS = {
    "<think>": "</think>",  # Qwen 3, DeepSeek R1, GLM 4.5, EXAONE 4, and most others
    "[THINK]": "[/THINK]",  # Magistral
    "<thought>": "</thought>",  # EXAONE Deep
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|end|>",  # gpt-oss
    "◁think▷": "◁/think▷",  # Kimi
}
"""What stands before and after a thought."""

_NEXT_MESSAGE = "<|start|>assistant"
"""What gpt-oss begins its answer with when it has thought."""

_MOST_BYTES = 4
"""Of a character in UTF-8, of which every token may have one."""

_THOUGHT = re.compile(
    "|".join(
        rf"{re.escape(begin)}.*?(?:{re.escape(end)}(?:{re.escape(_NEXT_MESSAGE)})?|\Z)"
        for begin, end in MARKS.items()
    ),
    re.DOTALL,
)


def thinking(tokenizer: Any, ids: Sequence[int], start: int) -> list[Span]:
    """The spans of thinking in the tokens of an answer, the first of which is at `start`."""
    text, offsets = _decoded(tokenizer, ids)
    return [
        (start + begin, start + end)
        for match in _THOUGHT.finditer(text)
        for begin, end in tokens_of(offsets, *match.span())
    ]


def _decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[Span]]:
    """The text of tokens, one by one; those that make a character together stand at its place."""
    text, offsets, together = "", list[Span](), list[int]()
    for token in ids:
        together.append(token)
        piece = tokenizer.decode(together)
        if not piece.endswith("\ufffd") or len(together) == _MOST_BYTES:
            offsets += [(len(text), len(text) + len(piece))] * len(together)
            text += piece
            together = []
    return text, offsets + [(len(text), len(text))] * len(together)
