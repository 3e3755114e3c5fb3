"""What the front end tells the scheduler of documents, in a request's `extra_args`.

Whoever calls a server over HTTP writes a document's name; the front end puts an identifier in its
place that nobody else knows. Neither torch nor vLLM is needed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.serving import names
from snapkv.serving.names import PREFIX
from snapkv.validation import require_int

DOCUMENT = PREFIX + names.DOCUMENT
"""The document that a request's prompt begins with."""

REGISTER = PREFIX + "register"
"""The identifier under which all of the prompt but its last token is kept as a document."""

DROP = PREFIX + "drop"
"""A document that no later request may name."""

ROOM = PREFIX + "room"
"""Nothing is done, but for saying how much room there is; see `Registry.room`."""

INSTRUCTION = PREFIX + "instruction"
"""Ids of the tokens that stand before every piece that is read again."""

BUDGET = PREFIX + "budget"
"""Tokens of a document that are kept, rounded up to whole blocks."""

_VERBS = (DOCUMENT, REGISTER, DROP, ROOM)


@dataclass(frozen=True, kw_only=True)
class Errand:
    """What a request does with a document.

    Attributes:
        verb: `DOCUMENT`, `REGISTER`, `DROP` or `ROOM`.
        document_id: which one.
        budget: of one that is registered; None for the server's.
        instruction_ids: likewise, see `INSTRUCTION`.
    """

    verb: str
    document_id: str
    budget: int | None = None
    instruction_ids: tuple[int, ...] = ()


def errand(extra_args: Mapping[str, Any] | None) -> Errand | None:
    """What a request does with a document; None where it has nothing to do with one.

    Raises:
        InvalidArgumentError: two things at once, or other settings beside it.
        InvalidTypeError: a value of the wrong type.
    """
    given = {
        name: value
        for name, value in (extra_args or {}).items()
        if isinstance(name, str) and name.startswith(PREFIX)
    }
    verb = next((name for name in _VERBS if name in given), None)
    if verb is None:
        return None
    document_id = given.pop(verb)
    if not isinstance(document_id, str) or not document_id:
        raise InvalidArgumentError(f"{verb}: expected an identifier, got {document_id!r}; pass one")
    budget: int | None = None
    instruction_ids: tuple[int, ...] = ()
    if verb == REGISTER:
        budget = given.pop(BUDGET, None)
        if budget is not None:
            require_int(BUDGET, budget, minimum=1)
        instruction_ids = tuple(given.pop(INSTRUCTION, ()))
        for token_id in instruction_ids:
            require_int(INSTRUCTION, token_id, minimum=0)
    for name in given:
        raise InvalidArgumentError(
            f"{name}: expected none beside {verb}, since a document is compressed once for all who "
            "name it and what follows it stays whole, got one; leave it out"
        )
    return Errand(
        verb=verb, document_id=document_id, budget=budget, instruction_ids=instruction_ids
    )
