"""What somebody gets who chooses no method: the largest votes, and one budget for all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from snapkv.policies.across_layers import AcrossLayers
from snapkv.policies.base import Policy
from snapkv.policies.budget import AutoBudget, ByteBudget
from snapkv.policies.snapkv import SnapKV
from snapkv.validation import AUTO, DEFAULT, LOST_LARGEST_VOTE, SMALL_WINDOW

MOST_VOTERS = 128
"""Tokens of a question; a longer one holds a text of its own, which asks for nothing."""

_BEFORE_A_QUESTION = {"voters": 64, "pooling": "max", "decay": None, "sink_tokens": None}
"""Where a text is compressed before it is asked about: what is asked for may stand on either side
of what the text's end looks at."""


def default_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the default's `SnapKV`, whose votes are the largest of any query and head.

    A width asks for pooling over neighbours, so there is no fading beside one. A budget that these
    choose goes by a bound of its own: each is as large as any query's, where a mean over the window
    is smaller.
    """
    pooling = {} if given.get("kernel_size") is not None else {"pooling": "fading"}
    largest = {"window_reduce": "max", "group_reduce": "max"}
    found = {"window_size": SMALL_WINDOW, **pooling, **largest, **given}
    budget = found.get("budget")
    auto = {} if budget == AUTO else budget.get(AUTO) if isinstance(budget, dict) else None
    if auto is not None and found["window_reduce"] == "max":
        found["budget"] = {AUTO: {"lost_vote": LOST_LARGEST_VOTE, **auto}}
    return found


def default_policy(
    budget: int | str | AutoBudget | ByteBudget | None = None, **given: Any
) -> AcrossLayers:
    """One budget for all layers, spent by the largest fading votes: for those who choose no method.

    `AcrossLayers` around `SnapKV` with a small window, whose votes fade and are the largest of any
    query and head, as in DefensiveKV (arXiv 2510.13334).

    Args:
        budget: tokens kept per KV head and layer on average, window included, "auto", or bytes as
            "12%" or "64MiB"; 1024 by default.
        given: any other parameters of `SnapKV`.
    """
    return AcrossLayers(SnapKV(**default_parameters({"budget": budget, **given})))


def asked_by(policy: Policy, question_tokens: int | None) -> Policy:
    """The default's method, whose voters are the question's tokens; any other as it is.

    Those are all from the question's first one to the prompt's end, and no fewer than its window:
    what a question asks for may stand well before its end. None, or more than `MOST_VOTERS`: nobody
    knows where it begins. 0: the text is read before it is asked about, and more of its end vote.
    """
    votes, usual = by_layer(policy), default_policy().policy
    if question_tokens is None or question_tokens > MOST_VOTERS or not isinstance(votes, SnapKV):
        return policy
    if replace(votes, budget=usual.budget, keep_ratio=None) != usual:
        return policy
    voters: Any = {"voters": max(question_tokens, votes.window_size)}
    asked = replace(votes, **(voters if question_tokens else _BEFORE_A_QUESTION))
    return asked if votes is policy else AcrossLayers(asked)


def by_layer(policy: Policy) -> Policy:
    """The default's method where every layer must choose by itself; any other as it is."""
    return policy.policy if isinstance(policy, AcrossLayers) else policy


def method_name(described: Mapping[str, Any]) -> str:
    """What people call the policy that `Policy.describe` has described.

    That is `DEFAULT` where all but how much it keeps and who votes is the default's; and the
    paper's name alone does not stand for votes that fade.
    """
    usual, own = default_policy().describe(), described.get("policy")
    free = {name: usual["policy"][name] for name in ("budget", "keep_ratio", "voters")}
    if isinstance(own, Mapping) and {**described, "policy": {**own, **free}} == usual:
        return DEFAULT
    name = str(described["name"])
    return f"{name}, fading" if described.get("pooling") == "fading" else name
