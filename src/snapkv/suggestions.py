"""Naming what the user probably meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidates most like `name`, as the end of an error message; empty where none is.

    Never the name itself, which is there and was not what was wanted.

    >>> nearest("snapvk", ["snapkv", "full"])
    '; did you mean snapkv?'
    """
    others = (candidate for candidate in candidates if candidate != name)
    by_lower_case = {candidate.lower(): candidate for candidate in others}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3)
    if not close:
        return ""
    return f"; did you mean {' or '.join(by_lower_case[match] for match in close)}?"
