"""What the front end tells the scheduler in a request's `extra_args`, and how much room there is.

Whoever calls a server over HTTP writes a document's name; the front end puts an identifier in its
place that nobody else knows. Neither torch nor vLLM is needed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapkv.validation import require_int
from snapkv_vllm import names
from snapkv_vllm.names import PREFIX, wrong

# What a request does, each with a document's identifier.
DOCUMENT = PREFIX + names.DOCUMENT  # its prompt begins with the document
REGISTER = PREFIX + "register"  # all of its prompt but the last token becomes the document

# What it says besides.
INSTRUCTION = PREFIX + "instruction"  # ids of the tokens before every piece that is read again
BUDGET = PREFIX + "budget"  # tokens that are kept, rounded up to whole blocks

_BESIDE = {DOCUMENT: (), REGISTER: (BUDGET, INSTRUCTION)}
VERBS = tuple(_BESIDE)

_FILE_EXTRA_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class DocumentRequest:
    """What a request does with a document: a verb, which document, and what it says besides."""

    verb: str
    document_id: str
    budget: int | None = None
    instruction_ids: tuple[int, ...] = ()


def document_request(extra_args: Mapping[str, Any] | None) -> DocumentRequest | None:
    """What a request does with a document; None where it has nothing to do with one.

    Refuses two actions at once, other settings with them, and invalid values.
    """
    given = {
        name: value
        for name, value in (extra_args or {}).items()
        if isinstance(name, str) and name.startswith(PREFIX)
    }
    verb = next((name for name in _BESIDE if name in given), None)
    if verb is None:
        return None
    document_id = given.pop(verb)
    if not isinstance(document_id, str) or not document_id:
        raise wrong(verb, "an identifier", repr(document_id), "pass one")
    for name in given.keys() - _BESIDE[verb]:
        once = "since a document is compressed once for all who name it"
        none = f"none with {verb}, {once} and what follows it stays whole"
        raise wrong(name, none, "one", "leave it out")
    if (budget := given.get(BUDGET)) is not None:
        require_int(BUDGET, budget, minimum=1)
    instruction = tuple(given.get(INSTRUCTION, ()))
    for token_id in instruction:
        require_int(INSTRUCTION, token_id, minimum=0)
    return DocumentRequest(
        verb=verb,
        document_id=document_id,
        budget=budget,
        instruction_ids=instruction,
    )


@dataclass(frozen=True, kw_only=True)
class DocumentLimits:
    """What documents may take of an engine's cache."""

    block_tokens: int  # what is kept of a document is rounded up to a multiple of it
    bytes_per_token: int  # in all layers
    most_tokens: int  # of all documents together
    budget: int  # kept of a document that says nothing else

    @property
    def most_bytes(self) -> int:
        return self.most_tokens * self.bytes_per_token

    @property
    def most_file_bytes(self) -> int:
        """Of one document as a file, with its positions and token ids."""
        return 2 * self.most_bytes + _FILE_EXTRA_BYTES

    def bytes_of(self, held_tokens: int) -> int:
        """What so many tokens take, in whole blocks."""
        return -(-held_tokens // self.block_tokens) * self.block_tokens * self.bytes_per_token

    def kept_tokens(self, tokens: int, budget: int | None) -> int:
        """How many tokens are held of a document of so many, at least a block."""
        size = self.block_tokens
        if tokens < size:
            block, remedy = f"at least the {size} tokens of a block", "ask about it unregistered"
            raise wrong("document", block, tokens, remedy)
        kept = -(-(self.budget if budget is None else budget) // size) * size
        return min(kept, tokens // size * size)
