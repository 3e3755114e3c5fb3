"""What the front end tells the scheduler of documents, in a request's `extra_args`.

Whoever calls a server over HTTP writes a document's name; the front end puts an identifier in its
place that nobody else knows. Neither torch nor vLLM is needed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_int
from snapkv_vllm import names
from snapkv_vllm.names import PREFIX

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

ADOPT = PREFIX + "adopt"
"""The identifier of a document that is not read: its blocks are there, for workers to fill."""

TOKENS = PREFIX + "tokens"
"""Ids of all tokens of a document that is adopted."""

KEPT = PREFIX + "kept"
"""How many of them it holds, in whole blocks."""

_VERBS = (DOCUMENT, REGISTER, ADOPT, DROP, ROOM)


@dataclass(frozen=True, kw_only=True)
class Errand:
    """What a request does with a document.

    Attributes:
        verb: `DOCUMENT`, `REGISTER`, `ADOPT`, `DROP` or `ROOM`.
        document_id: which one.
        budget: of one that is registered; None for the server's.
        instruction_ids: likewise, see `INSTRUCTION`.
        token_ids: of one that is adopted.
        kept_tokens: likewise, see `KEPT`.
    """

    verb: str
    document_id: str
    budget: int | None = None
    instruction_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    kept_tokens: int = 0


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
    read = {REGISTER: _of_registration, ADOPT: _of_adoption}.get(verb)
    own = {} if read is None else read(given)
    for name in given:
        raise InvalidArgumentError(
            f"{name}: expected none beside {verb}, since a document is compressed once for all who "
            "name it and what follows it stays whole, got one; leave it out"
        )
    return Errand(verb=verb, document_id=document_id, **own)


def _of_registration(given: dict[str, Any]) -> dict[str, Any]:
    """What a registration says, taken out of the settings that are given."""
    budget = given.pop(BUDGET, None)
    if budget is not None:
        require_int(BUDGET, budget, minimum=1)
    return {"budget": budget, "instruction_ids": _taken_ids(INSTRUCTION, given)}


def _of_adoption(given: dict[str, Any]) -> dict[str, Any]:
    """The same of an adoption."""
    kept_tokens = given.pop(KEPT, None)
    require_int(KEPT, kept_tokens, minimum=1)
    return {"token_ids": _taken_ids(TOKENS, given), "kept_tokens": kept_tokens}


def _taken_ids(name: str, given: dict[str, Any]) -> tuple[int, ...]:
    ids = tuple(given.pop(name, ()))
    for token_id in ids:
        require_int(name, token_id, minimum=0)
    return ids
