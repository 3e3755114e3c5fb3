"""What somebody gets who chooses no method: the paper's votes, pooled for what is copied next."""

from collections.abc import Mapping
from typing import Any

from snapkv.policies.auto_budget import AutoBudget
from snapkv.policies.snapkv import SnapKV
from snapkv.validation import SMALL_WINDOW


def default_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of `SnapKV`: fading and a small window, but for what is given.

    A width asks for pooling over neighbours, so there is no fading beside one.
    """
    pooling = {} if given.get("kernel_size") is not None else {"pooling": "fading"}
    return {"window_size": SMALL_WINDOW, **pooling, **given}


def default_policy(budget: int | str | AutoBudget | None = None, **given: Any) -> SnapKV:
    """SnapKV with fading pooling and a small window, for those who choose no method.

    Args:
        budget: tokens kept per KV head and layer, window included, or "auto"; 1024 by default.
        given: any other parameters of `SnapKV`.

    Raises:
        InvalidArgumentError: a value out of range.
        InvalidTypeError: a value of the wrong type.
    """
    return SnapKV(budget, **default_parameters(given))  # type: ignore[arg-type] # it checks
