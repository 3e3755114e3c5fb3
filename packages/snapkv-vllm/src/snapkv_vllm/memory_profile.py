"""The largest votes of a server, held while vLLM measures how much memory it needs.

vLLM gives the KV cache what its own largest step leaves free. A step may also put queries aside in
every layer, and when it is done copies keys and values of a layer at a time, or of a few that take
no more than `layers.MOST_BYTES`; both are tried out here at the sizes that the server allows. Where
all layers share one budget, their scores are held together, and then all that stays of them.
On a GPU that compiles the kernels too. Not counted: what an eviction from an answer computes, which
no prompt's length enlarges.
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
    """How large one step may become."""

    policies: Sequence[Policy]  # of what requests may ask for, one takes the most memory
    prompt_tokens: int  # that are held at most when a prompt is compressed
    step_tokens: int  # that one step computes, and so the most that short prompts keep in it
    # whose queries may wait in all layers: those of the prompts that end in one step, of one window
    # that began before it, and of answers that are evicted from
    recorded_tokens: int

    @classmethod
    def from_config(cls, vllm_config: Any) -> "LargestStep":
        """What vLLM's configuration allows, with the server's settings in it."""
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
    """Hold the queries that may wait for their vote, and vote after the block."""
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    tokens = largest.recorded_tokens
    waiting = [torch.empty(tokens, layer.num_heads, layer.head_size, **kind) for layer in layers]
    yield
    if layers:
        widest = max(layers, key=lambda layer: layer.num_heads * layer.head_size)
        for policy in largest.policies:
            vote = (
                _vote
                if find_across_layers(policy) is None
                else partial(_vote_across_layers, len(layers))
            )
            vote(widest, policy, largest, kind)
    del waiting


def _prompt(layer: Any, tokens: int, query_tokens: int, kind: dict[str, Any]) -> PromptLayer:
    """So many tokens as a policy sees them, of which the last ones have queries."""
    queries, width = min(query_tokens, tokens), layer.head_size
    keys = torch.zeros(1, layer.num_kv_heads, tokens, width, **kind)
    return PromptLayer(
        queries=torch.zeros(1, layer.num_heads, queries, width, **kind),
        keys=keys,
        values=torch.empty_like(keys, device="meta"),
        score_options=voting_layer(layer).score_options,
        layer_idx=0,
        depth=0,
        num_layers=1,
    )


@torch.inference_mode()
def _vote(layer: Any, policy: Policy, largest: LargestStep, kind: dict[str, Any]) -> None:
    kept = [torch.empty(2, layer.num_kv_heads, largest.step_tokens, layer.head_size, **kind)]
    prompt = _prompt(layer, largest.prompt_tokens, policy.query_tokens, kind)
    selection = policy.select(prompt)
    if selection is not None:
        keep = selection.keep_indices.clamp(min=0)  # -1 where a head keeps fewer than others
        kept += [ops.gather_tokens(prompt.keys, keep) for _ in range(2)]


@torch.inference_mode()
def _vote_across_layers(
    layers: int, layer: Any, policy: Policy, largest: LargestStep, kind: dict[str, Any]
) -> None:
    """In so many layers like this one, of which the first may keep all of the prompt."""
    prompt = _prompt(layer, largest.prompt_tokens, policy.query_tokens, kind)
    others = prompt.keys.new_zeros(layers - 1, *prompt.keys.shape[1:3], dtype=torch.float32)
    ranked = [others, score_layers(policy, prompt)]
    masks = mask_best(ranked, count_kept_tokens(policy, largest.prompt_tokens))
    del ranked, others
    shape = layer.num_kv_heads, prompt.keys.shape[2], layer.head_size
    held = [torch.empty(2, layers, *shape, **kind)]
    keep = ops.kept_indices(masks[0]).clamp(min=0)
    held += [ops.gather_tokens(prompt.keys, keep) for _ in range(2)]
