"""What somebody gets who chooses no method: the paper's votes, pooled for what is copied next."""

from collections.abc import Mapping
from typing import Any

from snapkv.policies.budget import AutoBudget, ByteBudget
from snapkv.policies.snapkv import SnapKV
from snapkv.validation import DEFAULT, SMALL_WINDOW


def default_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of `SnapKV`: fading and a small window, but for what is given.

    A width asks for pooling over neighbours, so there is no fading beside one.
    """
    pooling = {} if given.get("kernel_size") is not None else {"pooling": "fading"}
    return {"window_size": SMALL_WINDOW, **pooling, **given}


def default_policy(
    budget: int | str | AutoBudget | ByteBudget | None = None, **given: Any
) -> SnapKV:
    """SnapKV with fading pooling and a small window, for those who choose no method.

    Args:
        budget: tokens kept per KV head and layer, window included, "auto", or bytes as "12%" or
            "64MiB"; 1024 by default.
        given: any other parameters of `SnapKV`.
    """
    return SnapKV(budget, **default_parameters(given))


def method_name(described: Mapping[str, Any]) -> str:
    """What people call the policy that `Policy.describe` has described.

    That is `DEFAULT` where all but how much it keeps is the default's; and the paper's name alone
    does not stand for votes that fade.
    """
    usual = default_policy().describe()
    own = {name for name, value in described.items() if value != usual.get(name)}
    if own <= {"budget", "keep_ratio"}:
        return DEFAULT
    name = str(described["name"])
    return f"{name}, fading" if described.get("pooling") == "fading" else name
