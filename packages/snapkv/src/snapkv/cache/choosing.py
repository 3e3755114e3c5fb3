"""The choice at a prompt's end: which tokens a layer keeps."""

import functools

import torch

from snapkv.policies import Policy, PromptLayer, Selection
from snapkv.storage.base import TokenStore
from snapkv.storage.storage import Storage


@torch.no_grad()
def selection_of(
    policy: Policy, prompt: PromptLayer, storage: Storage, store: TokenStore
) -> Selection | None:
    """What a policy keeps of a layer at the end of its prompt; None for all of it.

    `store` is what the layer holds of the prompt by now.
    """
    return policy.select(with_token_cost(policy, prompt, storage, store))


def with_token_cost(
    policy: Policy, prompt: PromptLayer, storage: Storage, store: TokenStore
) -> PromptLayer:
    """The layer where its tokens cost what they do in such a storage."""
    heads = prompt.queries.shape[1] if policy.per_query_head else prompt.num_kv_heads
    return prompt.costing(functools.partial(storage.token_cost, store, heads))
