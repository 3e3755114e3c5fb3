"""What a method keeps, whether it looks at one layer or at all of them."""

from torch import Tensor

from snapkv import ops
from snapkv.policies import Policy, PromptLayer
from snapkv_vllm.across_layers import find_across_layers, select_across
from snapkv_vllm.admission.methods import count_kept_tokens


def kept_of(policy: Policy, layer: PromptLayer) -> Tensor:
    """(rows, H or 1, K) indices, of layers that are rows of a batch, after a leading run of -1."""
    if find_across_layers(policy) is None:
        return policy.select(layer).keep_indices
    (mask,) = select_across(policy, [layer], count_kept_tokens(policy, layer.keys.shape[2]))
    return ops.kept_indices(mask)
