"""Records of settings as entries of vLLM's `additional_config`, and back."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import nearest


def entry_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from the defaults, ready for JSON."""
    defaults = asdict(type(record)())
    return {name: value for name, value in asdict(record).items() if value != defaults[name]}


def require_fields(what: str, kind: type[Any], entry: Mapping[str, Any]) -> None:
    """Raise where an entry has a name that is no field of a dataclass.

    Raises:
        InvalidArgumentError: names it.
    """
    known = [one.name for one in fields(kind)]
    for name in entry:
        if name not in known:
            raise InvalidArgumentError(
                f"{what}: expected {', '.join(known)}, got {name!r}; leave it out"
                f"{nearest(name, known)}"
            )
