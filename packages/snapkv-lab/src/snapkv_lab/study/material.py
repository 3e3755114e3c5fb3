"""The material of studies: long documents, and questions that suit any text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from snapkv.errors import wrong
from snapkv_app import text_files
from snapkv_lab.evaluate.haystack import load_haystack, token_ids

QUESTIONS = (
    "What is the main argument of the text, and how does the author support it?",
    "Which people, places and things does the text mention, and what does it say about them?",
    "Which examples does the text give, and what does each of them show?",
    "Write a detailed summary of the text.",
)
"""The questions that are asked if the user has none."""


LEAST_TOKENS = 128
"""The shortest document that is accepted, in tokens."""


def load_long_texts(
    files: Sequence[str], *, count: int
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Load documents, and return a list of pairs (name, text) and a tuple of warnings.

    There is a warning for each file that was not read, which is also written to standard error.

    Args:
        files: the user's files; without any, parts of the default haystack are taken, each from
            another place to its end.
        count: how many parts of the haystack are taken.

    Raises:
        DocumentError: a file cannot be read.
    """
    if files:
        read, warnings = text_files.read_with_notices(files)
        return [(document.name, document.text) for document in read], tuple(warnings)
    haystack = load_haystack()
    starts = [len(haystack.pieces) * i // count for i in range(count)]
    texts = [
        (f"{haystack.name}, from piece {start + 1}", "\n\n".join(haystack.pieces[start:]))
        for start in starts
    ]
    return texts, ()


class CutDocuments(NamedTuple):
    """Documents that have been cut to the same length.

    Attributes:
        texts: the name and the text of each document.
        tokens: the number of tokens of each.
        shortest: the name of the document that had the fewest tokens before the cut.
    """

    texts: list[tuple[str, str]]
    tokens: int
    shortest: str


def cut_documents(tokenizer: Any, texts: Sequence[tuple[str, str]], tokens: int) -> CutDocuments:
    """Cut all documents to the same number of tokens.

    Args:
        tokenizer: the tokenizer of the model.
        texts: the name and the text of each document, at least one.
        tokens: the wanted number; the length of the shortest document is taken if it is less.

    Returns:
        The documents with their common length. A text may have one more token when it is tokenized
        again.

    Raises:
        InvalidArgumentError: a document is shorter than `LEAST_TOKENS`.
    """
    ids = [token_ids(tokenizer, text[: tokens * _CHARACTERS_PER_TOKEN]) for _, text in texts]
    shortest, of_it = min(zip(texts, ids, strict=True), key=lambda pair: len(pair[1]))
    most = min(tokens, len(of_it))
    if most < LEAST_TOKENS:
        problem = f"expected at least {LEAST_TOKENS} of document_tokens={tokens:,} tokens in each"
        remedy = "Pass a longer document"
        raise wrong("document", f"{problem}, but got {most:,} in {shortest[0]}", remedy)
    cut_texts = [
        (name, tokenizer.decode(own[:most], skip_special_tokens=True))
        for (name, _), own in zip(texts, ids, strict=True)
    ]
    return CutDocuments(cut_texts, most, shortest[0])


_CHARACTERS_PER_TOKEN = 12
"""More characters than any long text needs per token. The text after them is not tokenized."""
