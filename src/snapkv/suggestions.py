"""Naming what the user probably meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidates most like `name`, as the end of an error message; empty where none is.

    >>> nearest("snapvk", ["snapkv", "full"])
    '; did you mean snapkv?'
    """
    by_lower_case = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=3)
    if not close:
        return ""
    return f"; did you mean {' or '.join(by_lower_case[match] for match in close)}?"
