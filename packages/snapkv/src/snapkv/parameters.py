"""What a method or an option is made with: known by name, and as plain numbers.

Importable without torch.
"""

import inspect
from abc import ABCMeta
from typing import Any

from snapkv.errors import InvalidTypeError
from snapkv.kvpress_names import unknown_argument
from snapkv.validation import plain_number


class WithParameters(ABCMeta):
    """The type of dataclasses that users make.

    Numbers of numpy and torch become Python's before `__init__` sees them, so that parameters can
    be compared, shown and written to a file. Arguments that a class does not have are refused by
    name.
    """

    def __call__(cls, *args: Any, **given: Any) -> Any:
        """Make an instance.

        Raises:
            InvalidTypeError: an unknown argument, or more of them by place than there are.
        """
        known = cls.__signature__.parameters
        if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            for name in given:
                if name not in known:
                    raise InvalidTypeError(
                        unknown_argument(cls.__name__, name, given[name], list(known))
                    )
        if not any(each.kind is each.VAR_POSITIONAL for each in known.values()):
            by_place = [name for name, each in known.items() if each.kind is not each.KEYWORD_ONLY]
            if len(args) > len(by_place):
                raise InvalidTypeError(_misplaced(cls.__name__, args, by_place, list(known)))
        return super().__call__(
            *map(plain_number, args), **{name: plain_number(value) for name, value in given.items()}
        )

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of `__init__`, which `inspect` would not look for behind `__call__`."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc] # that of the class itself
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _misplaced(kind: str, args: tuple[Any, ...], by_place: list[str], known: list[str]) -> str:
    place = len(by_place)
    others = [name for name in known if name not in by_place]
    example = f"{others[0]}={args[place]!r}" if others else "none"
    return (
        f"{kind}: expected {' and '.join(by_place) or 'no argument'} by place and the others by "
        f"name, got {len(args)} arguments by place; pass the others as {', '.join(others)}, for "
        f"instance {example}"
    )
