"""The method for users who choose none: the largest votes, and one budget for all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from snapkv.policies.across_layers import AcrossLayers
from snapkv.policies.base import Policy
from snapkv.policies.budget import AutoBudget, ByteBudget, budget_of
from snapkv.policies.snapkv import SnapKV
from snapkv.validation import AUTO, DEFAULT, LOST_LARGEST_VOTE, SMALL_WINDOW, default_window

MOST_VOTERS = 1024
"""The largest number of tokens of a question that all vote, because a cache remembers the queries
of all voters."""

MOST_CHAT_VOTERS = 128
"""The largest number of tokens of a chat's last message that all vote. A longer one probably
contains a text of its own, which asks nothing."""

_BEFORE_A_QUESTION = {"voters": 64, "pooling": "max", "decay": None, "sink_tokens": None}
"""Parameters for a text that is compressed before its question is known. Its votes are pooled to
both sides, because what will be asked for may be on either side of the positions that the end of
the text looks at."""


def default_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the `SnapKV` policy that the default method uses.

    Of all queries and heads its largest vote counts. If the budget is small, almost no window is
    kept (`snapkv.validation.default_window`). A `kernel_size` asks for pooling over neighbours, so
    it replaces fading. If these votes choose the budget, it gets a higher bound on lost votes than
    `AutoBudget` has otherwise, because the largest vote is higher than a mean over the window.

    Args:
        given: the parameters that the user has set; they replace those of the default. They are not
            checked.

    Returns:
        A new dictionary of keyword arguments for `SnapKV`.

    Raises:
        InvalidArgumentError: a budget in bytes is out of range.
    """
    pooling = {} if given.get("kernel_size") is not None else {"pooling": "fading"}
    largest = {"window_reduce": "max", "group_reduce": "max"}
    found = {**_window(given), **pooling, **largest, **given}
    budget = found.get("budget")
    auto = {} if budget == AUTO else budget.get(AUTO) if isinstance(budget, dict) else None
    if auto is not None and found["window_reduce"] == "max":
        found["budget"] = {AUTO: {"lost_vote": LOST_LARGEST_VOTE, **auto}}
    return found


def _window(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the parameters of the default method that depend on its budget.

    Raises:
        InvalidArgumentError: a budget in bytes is out of range.
    """
    return default_window(given, getattr(ByteBudget.read(given.get("budget")), "share", None))


def default_policy(
    budget: int | str | AutoBudget | ByteBudget | None = None, **given: Any
) -> AcrossLayers:
    """Return the default method, which shares one budget among all layers.

    It is `AcrossLayers` around `SnapKV` with a small window. The votes fade along the prompt, and
    of all queries and heads the largest vote counts, as in DefensiveKV (arXiv 2510.13334).

    Args:
        budget: tokens kept per KV head and layer on average, window included; "auto" or an
            `AutoBudget`; or bytes as "12%", "64MiB" or a `ByteBudget`. 1024 by default.
        given: any other parameters of `SnapKV`.

    Raises:
        InvalidTypeError: an unknown parameter, or a value of the wrong type.
        InvalidArgumentError: a value is out of range, or two parameters contradict each other.
    """
    return AcrossLayers(SnapKV(**default_parameters({"budget": budget, **given})))


def adapt_to_question(policy: Policy, question_tokens: int | None) -> Policy:
    """Return the default method, changed so that all tokens of the question vote.

    The voters are all tokens from the question's first one to the prompt's end, but no fewer than
    `SMALL_WINDOW`, because a question may name what it asks for well before its end.

    Args:
        policy: any policy. It counts as the default method if it differs from it only in its
            budget, and also if it is the `SnapKV` inside it.
        question_tokens: tokens from the start of the question to the end of the prompt. 0 if the
            text is read before it is asked about: more tokens of its end vote then. None if it is
            not known where the question begins.

    Returns:
        A new policy; `policy` itself if it is not the default method, or if `question_tokens` is
        None or more than `MOST_VOTERS`.
    """
    votes = by_layer(policy)
    if question_tokens is None or question_tokens > MOST_VOTERS or not isinstance(votes, SnapKV):
        return policy
    # In files of release 0.3.0, a small budget has the window of a large one.
    usual = [default_policy(budget).policy for budget in (None, budget_of(votes))]
    if all(replace(votes, budget=one.budget, keep_ratio=None) != one for one in usual):
        return policy
    voters: Any = {"voters": max(question_tokens, SMALL_WINDOW)}
    adapted = replace(votes, **(voters if question_tokens else _BEFORE_A_QUESTION))
    return adapted if votes is policy else AcrossLayers(adapted)


def by_layer(policy: Policy) -> Policy:
    """Return the policy inside an `AcrossLayers`, with which layers do not share a budget.

    Any other policy is returned unchanged.
    """
    return policy.policy if isinstance(policy, AcrossLayers) else policy


def method_name(described: Mapping[str, Any]) -> str:
    """Return the name of a policy as users know it.

    It is `DEFAULT` if the policy differs from the default only in its budget and its voters.
    Otherwise it is the policy's own name, followed by ", fading" if the policy itself, and not one
    inside it, lets votes fade.

    Args:
        described: what `Policy.describe` returned.
    """
    usual, own = default_policy().describe(), described.get("policy")
    if isinstance(own, Mapping):
        free = {name: usual["policy"][name] for name in ("budget", "keep_ratio", "voters")}
        small = {**usual, "policy": usual["policy"] | _window({"budget": own.get("budget")}) | free}
        # In release 0.3.0, a small budget had the usual window.
        if {**described, "policy": {**own, **free}} in (usual, small):
            return DEFAULT
    name = str(described["name"])
    return f"{name}, fading" if described.get("pooling") == "fading" else name
