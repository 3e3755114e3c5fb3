"""How well a document answers beside the whole text: the same questions, asked of both."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from snapkv.validation import require_int
from snapkv_vllm.documents.catalogue import SharedDocument
from snapkv_vllm.documents.engine import EngineDocuments
from snapkv_vllm.documents.refused import RefusedError
from snapkv_vllm.documents.rewriting import Prompts
from snapkv_vllm.names import shown

_MOST_QUESTIONS = 32
_MOST_TOKENS = 256
_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One question.

    Attributes:
        question: as it was asked.
        whole: the greedy answer behind all of the text.
        document: the same behind what is kept of it.
        same_tokens: how many of the first tokens of both are the same.
        tokens: of the answer behind all of the text.
    """

    question: str
    whole: str
    document: str
    same_tokens: int
    tokens: int


async def report(
    document: SharedDocument, body: Mapping[str, Any], engine: EngineDocuments, prompts: Prompts
) -> dict[str, Any]:
    """Ask a document and its whole text the same questions, one after the other.

    The whole text is read by the engine as any prompt, once where it caches prefixes.

    Args:
        document: in use until this is done.
        body: of the request: `questions`, up to 32 of them, and `max_tokens` of an answer.
        engine: answers.
        prompts: makes tokens.

    Returns:
        Ready for JSON: how many answers are the same, of how many, and every one of them.

    Raises:
        RefusedError: a field that is wrong, or a question that has no tokens.
        InvalidTypeError: a number that is none.
    """
    questions, most = _required(body)
    found, equal = [], 0
    for question in questions:
        ids = await _prompt(document, question, prompts)
        whole = await engine.answer(ids, None, most)
        kept = await engine.answer(ids, document.document_id, most)
        equal += whole.token_ids == kept.token_ids
        pairs = zip(whole.token_ids, kept.token_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        found.append(
            Compared(
                question=question,
                whole=whole.text,
                document=kept.text,
                same_tokens=same,
                tokens=len(whole.token_ids),
            )
        )
    return {"same": equal, "of": len(found), "answers": [asdict(one) for one in found]}


def _required(body: Mapping[str, Any]) -> tuple[list[str], int]:
    """The questions, and the most tokens of an answer."""
    for field in body:
        if field not in ("questions", "max_tokens", "model"):
            raise RefusedError(
                f"{shown(field)}: expected questions, max_tokens, got '{shown(field)}'; leave it "
                "out"
            )
    questions = body.get("questions")
    asked = isinstance(questions, list) and 1 <= len(questions) <= _MOST_QUESTIONS
    if not asked or not all(isinstance(one, str) and one for one in questions or ()):
        raise RefusedError(
            f"questions: expected a list of 1 to {_MOST_QUESTIONS} texts, got something else; "
            'pass {"questions": ["...", "..."]}'
        )
    most = body.get("max_tokens", _TOKENS)
    require_int("max_tokens", most, minimum=1, maximum=_MOST_TOKENS)
    return list(questions or ()), most


async def _prompt(document: SharedDocument, question: str, prompts: Prompts) -> list[int]:
    """The whole text, and the question behind it."""
    if document.messages is None:
        asked = await prompts.tokenize(question, special_tokens=False)
        return [*document.token_ids, *asked]
    messages = [*document.messages, {"role": "user", "content": question}]
    ids = await prompts.render({"messages": messages})
    if ids is None or tuple(ids[: len(document.token_ids)]) != document.token_ids:
        raise RefusedError(
            "questions: expected ones that the chat template puts behind the document, got one "
            "that changes its beginning; ask it otherwise, or register the document again"
        )
    return ids
