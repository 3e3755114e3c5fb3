"""What the studies read: long documents and questions that can be asked about any of them."""

from collections.abc import Sequence
from typing import Any

from snapkv import documents
from snapkv.errors import InvalidArgumentError
from snapkv.evaluate.haystack import load_haystack
from snapkv.evaluate.sample import Sample
from snapkv.settings import GenerationSettings

QUESTIONS = (
    "What is the main argument of the text, and how does the author support it?",
    "Which people, places and things does the text mention, and what does it say about them?",
    "Which examples does the text give, and what does each of them show?",
    "Write a detailed summary of the text.",
)
"""Asked where the user asks nothing."""


def long_texts(
    tokenizer: Any, files: Sequence[str], *, count: int, tokens: int
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Names and texts of documents, each cut to the same number of tokens, and what is not in them.

    Args:
        tokenizer: the model's.
        files: a document each; none for essays, or Python's documentation, from `count` places.
        count: how many documents to take where no files are given.
        tokens: length to cut each of them to.

    Raises:
        DocumentError: a file is missing or holds no text.
        InvalidArgumentError: a document is shorter than that.
    """
    warnings: list[str] = []
    if files:
        read, warnings = documents.read_noting(files)
        found = [(document.name, document.text) for document in read]
    else:
        haystack = load_haystack()
        starts = [len(haystack.pieces) * i // count for i in range(count)]
        found = [
            (f"{haystack.name}, from piece {start + 1}", "\n\n".join(haystack.pieces[start:]))
            for start in starts
        ]
    return [(name, _cut(tokenizer, name, text, tokens)) for name, text in found], tuple(warnings)


def asked(
    name: str, document: str, question: str, settings: GenerationSettings, *, first: bool = False
) -> Sample:
    """A sample with its question behind the document, or in front of it.

    Args:
        name: of the sample.
        document: the long text.
        question: about it.
        settings: how the answer is generated.
        first: whether the question comes first.
    """
    if first:
        return Sample(
            name=name,
            cell={},
            context=f"{question}\n\n{document}",
            question="",
            plain_question="\n\nAnswer:",
            references=(),
            settings=settings,
        )
    return Sample(
        name=name,
        cell={},
        context=document,
        question=f"\n\n{question}",
        plain_question=f"\n\nQuestion: {question}\nAnswer:",
        references=(),
        settings=settings,
    )


_CHARACTERS_PER_TOKEN = 12
"""More than any long stretch of text needs; what is behind that is not tokenized."""


def _cut(tokenizer: Any, name: str, text: str, tokens: int) -> str:
    start = text[: tokens * _CHARACTERS_PER_TOKEN]
    ids = tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < tokens:
        raise InvalidArgumentError(
            f"document: expected at least document_tokens={tokens:,} tokens in each, got "
            f"{len(ids):,} in {name}; lower document_tokens, or pass a longer document"
        )
    cut: str = tokenizer.decode(ids[:tokens], skip_special_tokens=True)
    return cut
