"""Count the votes of the last tokens of a prompt for all of its tokens."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from snapkv import ops
from snapkv.cache.queries import last_tokens
from snapkv.page.packing import Ballot
from snapkv.policies import Policy, PromptLayer, SnapKV
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv_app.models import LoadedModel
from snapkv_app.observing import observed


def scorer_of(policy: Policy) -> PrefixPolicy | None:
    """Return the innermost policy that another policy wraps; None if it does not score tokens."""
    for name in ("policy", "prompt"):
        inner = getattr(policy, name, None)
        if isinstance(inner, Policy):
            return scorer_of(inner)
    return policy if isinstance(policy, PrefixPolicy) else None


def ballots(loaded: LoadedModel, ids: Tensor, policies: Sequence[Policy]) -> list[Ballot | None]:
    """Count the votes for the tokens of a prompt, as each policy counts them.

    The votes are summed over all query heads and layers. The prompt is read one time, and only one
    layer is stored in full at any time.

    Args:
        loaded: the model.
        ids: (1, T) int64, the tokens of the prompt.
        policies: the policies.

    Returns:
        One ballot per policy, in their order; None for a policy that counts no votes.
    """
    scorers = [scorer_of(policy) for policy in policies]
    voting = [scorer if isinstance(scorer, SnapKV) else None for scorer in scorers]
    most = max((each.query_tokens for each in voting if each is not None), default=0)
    counted: list[Tensor | None] = [None] * len(policies)

    def look(layer: PromptLayer) -> None:
        for place, scorer in enumerate(voting):
            if scorer is not None:
                votes, before = layer_votes(scorer, layer), counted[place]
                counted[place] = votes if before is None else before + votes

    if most:
        observed(loaded, ids, most, look)
    return [
        _ballot(scorer, votes) if scorer is not None and votes is not None else None
        for scorer, votes in zip(voting, counted, strict=True)
    ]


def _ballot(scorer: SnapKV, votes: Tensor) -> Ballot:
    sinks = scorer.sink_tokens or 0
    return Ballot(votes=votes, sink_tokens=sinks, window_tokens=scorer.window_size)


def layer_votes(scorer: SnapKV, layer: PromptLayer) -> Tensor:
    """Compute the votes that each voter alone would give to every token in one layer.

    They are its attention, pooled as the policy pools votes, and summed over the query heads. The
    window gets no votes, because it is always kept.

    Args:
        scorer: the policy.
        layer: a layer with T tokens and at least the queries of the W voters.

    Returns:
        (W, T) float32 on the CPU, the votes of each voter for each token.
    """
    queries = last_tokens(layer.queries, scorer.query_tokens)
    tokens = layer.keys.shape[2]
    found = torch.zeros(queries.shape[2], tokens, device=queries.device)
    if (prefix := tokens - scorer.window_size) <= 0:
        return found.cpu()
    shared = queries.shape[1] // layer.keys.shape[1]
    for head in range(queries.shape[1]):
        own, options = slice(head, head + 1), layer.score_options
        if options.sink_logits is not None:
            options = replace(options, sink_logits=options.sink_logits[own])
        keys = layer.keys[:, head // shared : head // shared + 1]
        weights = ops.attention_weights(ops.AttentionStates(queries[:, own], keys, options))[0]
        found[:, :prefix] += scorer.pool(weights[..., :prefix], layer)[0]
    return found.cpu()
