"""The tokens that a method keeps, whether it selects by layer or in all layers together."""

from torch import Tensor

from snapkv import ops
from snapkv.policies import Policy, PromptLayer
from snapkv_vllm.across_layers import find_across_layers, select_across
from snapkv_vllm.admission.methods import count_kept_tokens


def kept_of(policy: Policy, layer: PromptLayer) -> Tensor:
    """Return the slots that a method keeps in some layers, which are rows of a batch, as if they
    were all layers.

    Returns:
        (rows, H or 1, K) int64; shorter rows begin with -1.
    """
    if find_across_layers(policy) is None:
        return policy.select(layer).keep_indices
    (mask,) = select_across(policy, [layer], count_kept_tokens(policy, layer.keys.shape[2]))
    return ops.kept_indices(mask)
