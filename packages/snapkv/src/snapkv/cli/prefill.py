"""From `--prefill` to the ways in which prompts are read."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from snapkv.app.prefills import PREFILLS, Prefill
from snapkv.cli.amounts import count
from snapkv.errors import InvalidArgumentError
from snapkv.validation import nearest


def read_prefill(text: str) -> Prefill:
    """What ``NAME`` or ``NAME:PARAMETER=VALUE,PARAMETER=VALUE`` stands for.

    Raises:
        InvalidArgumentError: an unknown name, parameter or value.
    """
    name, _, rest = text.partition(":")
    if name not in PREFILLS:
        raise InvalidArgumentError(
            f"prefill: expected one of {', '.join(PREFILLS)}, got {name!r}{nearest(name, PREFILLS)}"
        )
    kind = PREFILLS[name]
    given = [_parameter(kind, part) for part in rest.split(",") if part.strip()]
    parameters = dict(given)
    if len(parameters) < len(given):
        raise InvalidArgumentError(
            f"prefill: expected every parameter once, got {text!r}; leave the repeated one out"
        )
    return kind(**parameters)


def read_prefills(texts: Sequence[str]) -> list[tuple[str, Prefill]]:
    """As `read_prefill`, several, each under the text that it was given by.

    Raises:
        InvalidArgumentError: as there, or one of them twice.
    """
    if len(set(texts)) < len(texts):
        raise InvalidArgumentError(
            f"prefill: expected every way of reading once, got {' '.join(texts)}; leave the "
            "repeated one out"
        )
    return [(text, read_prefill(text)) for text in texts]


def _parameter(kind: type[Prefill], text: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in text.partition("="))
    name = name.replace("-", "_")
    known = [field.name for field in fields(kind)]
    if not equals or name not in known:
        raise InvalidArgumentError(
            f"prefill: expected {kind.name} with {', '.join(known) or 'no parameters'} as "
            f"NAME=VALUE, got {text!r}{nearest(name, known)}"
        )
    hint = get_type_hints(kind)[name]
    if int in (hint, *get_args(hint)):
        return name, count(name, value, f"--prefill {kind.name}:{name}=")
    try:
        return name, float(value)
    except ValueError:
        raise InvalidArgumentError(
            f"{name}: expected a number, got {value!r}; write for instance "
            f"--prefill {kind.name}:{name}={getattr(kind, name)}"
        ) from None
