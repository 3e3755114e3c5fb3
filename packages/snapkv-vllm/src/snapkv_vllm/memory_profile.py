"""Allocates what the largest step of a server needs, while vLLM measures its memory.

vLLM gives the KV cache the memory that its own largest step leaves free. A step of this plugin may
also record queries in every layer, and after the step it copies keys and values of a layer at a
time, or of some layers that take at most `layers.MAX_COPY_BYTES`. Both are done here with the
largest sizes that the server allows. If all layers share a budget, the scores and the kept tokens
of all layers are in memory together. On a GPU this also compiles the kernels. Evictions from
answers are not measured, because they do not grow with the prompt.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from snapkv import ops
from snapkv.policies import Policy, PromptLayer
from snapkv_vllm.across_layers import find_across_layers, mask_best, score_layers
from snapkv_vllm.admission.methods import count_kept_tokens
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.layers import voting_layer


@dataclass(frozen=True, kw_only=True)
class LargestStep:
    """The sizes of the largest step that the settings of a server allow."""

    policies: Sequence[Policy]  # one of them needs the most memory of all that requests may use
    prompt_tokens: int  # the longest prompt
    step_tokens: int  # the most tokens that a step computes, and that its short prompts keep
    # Tokens whose queries may be recorded in all layers: the windows of prompts that end in a step,
    # one window that began before it, and the last tokens of answers with a budget.
    recorded_tokens: int

    @classmethod
    def from_config(cls, vllm_config: Any) -> "LargestStep":
        """Compute the largest sizes from vLLM's configuration, which contains the settings of the
        server.

        Raises:
            InvalidArgumentError: the settings have an unknown name or a value that is out of range.
            InvalidTypeError: a value of the settings has the wrong type.
        """
        settings = ServingSettings.from_config(vllm_config.additional_config)
        scheduler, limits = vllm_config.scheduler_config, settings.limits
        prompt_tokens = vllm_config.model_config.max_model_len
        policies = settings.most_expensive_policies(prompt_tokens)
        step_tokens = scheduler.max_num_batched_tokens
        window = max(one.query_tokens for one in policies)
        return cls(
            policies=policies,
            prompt_tokens=prompt_tokens,
            step_tokens=step_tokens,
            recorded_tokens=min(step_tokens, scheduler.max_num_seqs * window)
            + window
            + scheduler.max_num_seqs * limits.pending_queries_per_answer,
        )


@contextlib.contextmanager
def hold_largest_queries(
    layers: Sequence[Any], largest: LargestStep, *, dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    """Allocate the largest recorded queries during the ``with`` block, and compress a prompt of the
    largest size at its end, while they are still allocated.

    All of it is freed afterwards, so that only the peak of the device's memory shows it. The prompt
    is compressed with every policy of `largest`, with the sizes of the layer that has the widest
    queries.

    Args:
        layers: vLLM's attention layers that are compressed; nothing is done without any.
        largest: the sizes.
        dtype: the dtype of the model.
        device: where the memory is allocated.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    tokens = largest.recorded_tokens
    waiting = [torch.empty(tokens, layer.num_heads, layer.head_size, **options) for layer in layers]
    yield
    if layers:
        widest = max(layers, key=lambda layer: layer.num_heads * layer.head_size)
        for policy in largest.policies:
            across = find_across_layers(policy) is not None
            vote = partial(_vote_across_layers, len(layers)) if across else _vote
            vote(widest, policy, largest, options)
    del waiting


def _prompt(layer: Any, tokens: int, query_tokens: int, options: dict[str, Any]) -> PromptLayer:
    """Build the input of a policy for a prompt of `tokens` zeros in one layer.

    Args:
        layer: vLLM's attention layer.
        tokens: the length of the prompt.
        query_tokens: how many of the last tokens have queries, or all of them if there are fewer.
        options: the dtype and the device of the tensors.
    """
    queries, width = min(query_tokens, tokens), layer.head_size
    keys = torch.zeros(1, layer.num_kv_heads, tokens, width, **options)
    return PromptLayer(
        queries=torch.zeros(1, layer.num_heads, queries, width, **options),
        keys=keys,
        values=torch.empty_like(keys, device="meta"),
        score_options=voting_layer(layer).score_options,
        layer_idx=0,
        depth=0,
        num_layers=1,
    )


@torch.inference_mode()
def _vote(layer: Any, policy: Policy, largest: LargestStep, options: dict[str, Any]) -> None:
    """Allocate what a compression of one layer with `policy` needs, by compressing a prompt of
    zeros. Nothing is returned, and all memory is free again afterwards, so that only the device's
    peak shows it.

    Args:
        layer: vLLM's attention layer, from which the sizes are taken.
        policy: the method, which must not compress layers together; see `_vote_across_layers`.
        largest: the length of the prompt, and the number of tokens that a step keeps.
        options: the dtype and the device of all tensors.
    """
    kept = [torch.empty(2, layer.num_kv_heads, largest.step_tokens, layer.head_size, **options)]
    prompt = _prompt(layer, largest.prompt_tokens, policy.query_tokens, options)
    selection = policy.select(prompt)
    if selection is not None:
        # -1 stands for a token that a head does not keep.
        keep = selection.keep_indices.clamp(min=0)
        kept += [ops.gather_tokens(prompt.keys, keep) for _ in range(2)]


@torch.inference_mode()
def _vote_across_layers(
    layers: int, layer: Any, policy: Policy, largest: LargestStep, options: dict[str, Any]
) -> None:
    """Use as much memory as compressing a prompt in several layers together can need.

    Most is needed if the first layer keeps all of its tokens, so the other layers get scores of
    zero. All memory is free again afterwards: the caller reads the peak of the device.

    Args:
        layers: how many layers share one budget. Only the first of them is scored.
        layer: vLLM's attention layer, from which the sizes are taken.
        policy: the method, which compresses all layers together.
        largest: the length of the prompt.
        options: the dtype and the device of all tensors.
    """
    prompt = _prompt(layer, largest.prompt_tokens, policy.query_tokens, options)
    others = prompt.keys.new_zeros(layers - 1, *prompt.keys.shape[1:3], dtype=torch.float32)
    scores = [others, score_layers(policy, prompt)]
    masks = mask_best(scores, count_kept_tokens(policy, largest.prompt_tokens))
    del scores, others
    shape = layer.num_kv_heads, prompt.keys.shape[2], layer.head_size
    held = [torch.empty(2, layers, *shape, **options)]
    keep = ops.kept_indices(masks[0]).clamp(min=0)
    held += [ops.gather_tokens(prompt.keys, keep) for _ in range(2)]
