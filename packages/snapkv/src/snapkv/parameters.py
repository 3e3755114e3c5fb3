"""The metaclass of methods and options: it checks arguments by name and converts numbers.

Importable without torch.
"""

import inspect
from abc import ABCMeta
from typing import Any

from snapkv.errors import InvalidTypeError, SnapKVError, wrong
from snapkv.kvpress_names import unknown_argument
from snapkv.validation import plain_number


class WithParameters(ABCMeta):
    """The type of dataclasses that users build.

    Numbers of numpy and torch are converted to Python's before `__init__` gets them, so that
    parameters can be compared, shown and written to a file. Arguments that a class does not have
    are refused by name.
    """

    def __call__(cls, *args: Any, **given: Any) -> Any:
        """Build an instance.

        Raises:
            InvalidTypeError: an argument is unknown, or there are too many positional arguments.
        """
        known = cls.__signature__.parameters
        if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            for name in given:
                if name not in known:
                    raise unknown_argument(cls.__name__, name, given[name], list(known))
        if not any(each.kind is each.VAR_POSITIONAL for each in known.values()):
            by_place = [name for name, each in known.items() if each.kind is not each.KEYWORD_ONLY]
            if len(args) > len(by_place):
                raise _misplaced(cls.__name__, args, by_place, list(known))
        return super().__call__(
            *map(plain_number, args), **{name: plain_number(value) for name, value in given.items()}
        )

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of `__init__`, which `inspect` does not find because of `__call__`."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc] # that of the class itself
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _misplaced(
    class_name: str, args: tuple[Any, ...], by_place: list[str], known: list[str]
) -> SnapKVError:
    """Return the error for a call with too many positional arguments."""
    others = [name for name in known if name not in by_place]
    expected = f"expected {' and '.join(by_place) or 'no argument'} by position"
    problem = f"{expected}, but got {len(args)} arguments"
    remedy = "Remove these arguments"
    if others:
        remedy = f"Pass the others by name, for example {others[0]}={args[len(by_place)]!r}"
    return wrong(class_name, problem, remedy, InvalidTypeError)
