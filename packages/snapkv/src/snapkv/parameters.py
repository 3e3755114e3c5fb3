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
    """The metaclass of the dataclasses that users create, such as policies and budgets.

    Numbers of numpy and torch are converted to Python's before `__init__` gets them, so that
    parameters can be compared, shown and written to a file. An argument that the class does not
    have is refused, and the error says which argument to use instead.
    """

    def __call__(cls, *args: Any, **given: Any) -> Any:
        """Create an instance, after converting its numbers by `plain_number`.

        Raises:
            InvalidTypeError: an argument is unknown, or there are too many positional arguments.
                The class's own `__init__` may raise further errors.
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
        """The signature of `__init__` without `self`.

        `inspect` would otherwise show the signature of the metaclass's `__call__`.
        """
        signature = inspect.signature(cls.__init__)  # type: ignore[misc] # that of the class itself
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _misplaced(
    class_name: str, args: tuple[Any, ...], by_place: list[str], known: list[str]
) -> SnapKVError:
    """Build the error for a call with too many positional arguments.

    Args:
        class_name: the class that was called.
        args: all positional arguments of the call.
        by_place: the parameters that may be passed by position.
        known: all parameters.
    """
    others = [name for name in known if name not in by_place]
    expected = f"expected {' and '.join(by_place) or 'no argument'} by position"
    problem = f"{expected}, but got {len(args)} arguments"
    remedy = "Remove these arguments"
    if others:
        remedy = f"Pass the others by name, for example {others[0]}={args[len(by_place)]!r}"
    return wrong(class_name, problem, remedy, InvalidTypeError)
