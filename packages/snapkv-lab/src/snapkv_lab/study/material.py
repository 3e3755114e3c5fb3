"""What the studies read: long documents and questions that can be asked about any of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from snapkv.errors import InvalidArgumentError
from snapkv_app import text_files
from snapkv_lab.evaluate.haystack import load_haystack, token_ids

QUESTIONS = (
    "What is the main argument of the text, and how does the author support it?",
    "Which people, places and things does the text mention, and what does it say about them?",
    "Which examples does the text give, and what does each of them show?",
    "Write a detailed summary of the text.",
)
"""Asked where the user asks nothing."""


LEAST_TOKENS = 128
"""A document shorter than that is refused."""


def load_long_texts(
    files: Sequence[str], *, count: int
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Names and texts of documents, and a line for each thing that was not read of them."""
    if files:
        read, warnings = text_files.read_noting(files)
        return [(document.name, document.text) for document in read], tuple(warnings)
    haystack = load_haystack()
    starts = [len(haystack.pieces) * i // count for i in range(count)]
    texts = [
        (f"{haystack.name}, from piece {start + 1}", "\n\n".join(haystack.pieces[start:]))
        for start in starts
    ]
    return texts, ()


class CutDocuments(NamedTuple):
    """Documents of the same length."""

    texts: list[tuple[str, str]]
    tokens: int
    shortest: str


def cut_documents(tokenizer: Any, texts: Sequence[tuple[str, str]], tokens: int) -> CutDocuments:
    """Documents cut to a number of tokens, or all of them to what the shortest one has."""
    ids = [token_ids(tokenizer, text[: tokens * _CHARACTERS_PER_TOKEN]) for _, text in texts]
    shortest, of_it = min(zip(texts, ids, strict=True), key=lambda pair: len(pair[1]))
    most = min(tokens, len(of_it))
    if most < LEAST_TOKENS:
        raise InvalidArgumentError(
            f"document: expected at least document_tokens={tokens:,} tokens in each, or "
            f"{LEAST_TOKENS} to cut all of them to, got {most:,} in {shortest[0]}; pass a longer "
            "document"
        )
    cut_texts = [
        (name, tokenizer.decode(own[:most], skip_special_tokens=True))
        for (name, _), own in zip(texts, ids, strict=True)
    ]
    return CutDocuments(cut_texts, most, shortest[0])


_CHARACTERS_PER_TOKEN = 12
"""More than any long stretch of text needs; what is after that is not tokenized."""
