"""What the front end tells the scheduler in a request's `extra_args`, and is told in its answer.

Whoever calls a server over HTTP writes a document's name; the front end puts an identifier in its
place that nobody else knows. Neither torch nor vLLM is needed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapkv.validation import require_int
from snapkv_vllm import names
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.names import PREFIX, wrong

# What a request does, each with a document's identifier.
DOCUMENT = PREFIX + names.DOCUMENT  # its prompt begins with the document
REGISTER = PREFIX + "register"  # all of its prompt but the last token becomes the document
ADOPT = PREFIX + "adopt"  # blocks are taken for the document, which workers fill from a file
DROP = PREFIX + "drop"  # no later request may name the document
ROOM = PREFIX + "room"  # it is told how much room there is, see `DocumentLimits`

# What it says besides.
INSTRUCTION = PREFIX + "instruction"  # ids of the tokens before every piece that is read again
BUDGET = PREFIX + "budget"  # tokens that are kept, rounded up to whole blocks
TOKENS = PREFIX + "tokens"  # ids of all tokens of a document that is adopted
KEPT = PREFIX + "kept"  # how many of them are counted as held
REUSED = PREFIX + "reused"  # how many of those lie in blocks that requests only read
PER_HEAD = PREFIX + "per_head_budget"  # whether its heads hold different numbers of tokens

_BESIDE = {
    DOCUMENT: (),
    REGISTER: (BUDGET, INSTRUCTION),
    ADOPT: (TOKENS, KEPT, REUSED, PER_HEAD),
    DROP: (),
    ROOM: (),
}
VERBS = tuple(_BESIDE)

_FILE_EXTRA_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class DocumentRequest:
    """What a request does with a document: a verb, which document, and what it says besides."""

    verb: str
    document_id: str
    budget: int | None = None
    instruction_ids: tuple[int, ...] = ()
    prefix: CachedPrefix | None = None  # what is adopted


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
    return DocumentRequest(
        verb=verb,
        document_id=document_id,
        budget=budget,
        instruction_ids=_ids(INSTRUCTION, given),
        prefix=_prefix(given) if verb == ADOPT else None,
    )


def _prefix(given: Mapping[str, Any]) -> CachedPrefix:
    require_int(KEPT, given.get(KEPT), minimum=1)
    require_int(REUSED, given.get(REUSED), minimum=0)
    return CachedPrefix(
        token_ids=_ids(TOKENS, given),
        kept_tokens=given[KEPT],
        reused_tokens=given[REUSED],
        per_head_budget=bool(given.get(PER_HEAD)),
    )


def _ids(name: str, given: Mapping[str, Any]) -> tuple[int, ...]:
    ids = tuple(given.get(name, ()))
    for token_id in ids:
        require_int(name, token_id, minimum=0)
    return ids


def adoption(document_id: str, prefix: CachedPrefix) -> dict[str, Any]:
    """What a request says that has blocks taken for a document."""
    return {
        ADOPT: document_id,
        TOKENS: list(prefix.token_ids),
        KEPT: prefix.kept_tokens,
        REUSED: prefix.reused_tokens,
        PER_HEAD: prefix.per_head_budget,
    }


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
