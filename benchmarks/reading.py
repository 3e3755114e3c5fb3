"""Read a prompt once, then compress copies of its cache with every method.

Reading takes almost all the time, and every method starts from the same full cache. So a policy
that keeps everything records what policies are shown at the end of the prompt, and each method is
then asked as `snapkv.hf.attention` would ask it. `tests/quality` checks that the result equals a
real compressed prefill bit for bit.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from snapkv import CompressedCache
from snapkv.kvzip import repeat_context
from snapkv.policies import Policy, PromptLayer, Selection
from snapkv.policies.base import Need

MOST_WINDOW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Recorder(Policy):
    """Keeps everything and notes what it was shown, layer by layer."""

    name: ClassVar[str] = "recorder"

    recorded_queries: int
    layers: list[PromptLayer] = field(default_factory=list)

    @property
    def query_tokens(self) -> int:
        """Enough for every method that is asked afterwards."""
        return self.recorded_queries

    @property
    def needs(self) -> frozenset[Need]:
        """All there is, so that every method can be asked afterwards."""
        return frozenset({"rotation", "output_weight", "token_ids"})

    def select(self, layer: PromptLayer) -> Selection | None:
        """Note the layer; keep everything."""
        self.layers.append(layer)
        return None


@dataclass(frozen=True, kw_only=True)
class ReadPrompt:
    """A prompt that a model has read with full attention.

    Attributes:
        model: the model.
        layers: what a policy is shown at the end of the prompt, one entry per layer.
        last_logits: (1, 1, V), the logits behind the prompt; the same whatever is kept.
    """

    model: Any
    layers: list[PromptLayer]
    last_logits: Tensor

    @property
    def prompt_tokens(self) -> int:
        """T, tokens in the prompt."""
        return self.layers[0].keys.shape[2]

    def compressed(self, policy: Policy, **options: Any) -> CompressedCache:
        """A cache as it is after a prefill with that policy; the recording stays untouched."""
        cache = CompressedCache(self.model, policy, **options)
        cache.expect_prompt(self.prompt_tokens)
        for layer, states in zip(cache.layers, self.layers, strict=True):
            layer.update(states.keys, states.values)
            if "token_ids" in policy.needs:
                layer.remember_ids(states.token_ids)
            shown = replace(states, queries=self._last_queries(states, policy))
            layer.end_prompt(policy.select(shown), shown)
        return cache

    def _last_queries(self, states: PromptLayer, policy: Policy) -> Tensor:
        wanted = min(policy.query_tokens, self.prompt_tokens)
        recorded = states.queries.shape[2]
        if wanted > recorded:
            raise ValueError(f"expected {wanted} recorded queries for {policy!r}, got {recorded}")
        return states.queries[:, :, recorded - wanted :]


@torch.inference_mode()
def read_prompt_twice(
    model: Any, prompt_ids: list[int], *, policy: Policy, instruction_ids: list[int]
) -> ReadPrompt:
    """Read one prompt and have the model repeat it, for policies like this one."""
    ids = torch.tensor([prompt_ids], device=model.device)
    cache = CompressedCache(model, policy)
    layers = repeat_context(model, ids, cache, instruction_ids=instruction_ids)
    cache.crop(-1)  # the last token is read again, for its logits
    cache.expect_prompt(len(prompt_ids) + 1)  # and nothing is to be dropped behind it
    logits = model(ids[:, -1:], past_key_values=cache).logits
    return ReadPrompt(model=model, layers=layers, last_logits=logits)


@torch.inference_mode()
def read_prompt(
    model: Any, prompt_ids: list[int], *, recorded_queries: int = MOST_WINDOW_TOKENS
) -> ReadPrompt:
    """Read one prompt with the full cache, recording it and its last queries.

    The model must have full attention in every layer, as the demo model has.
    """
    recorder = Recorder(recorded_queries=recorded_queries)
    ids = torch.tensor([prompt_ids], device=model.device)
    cache = CompressedCache(model, recorder)
    cache.expect_tokens(ids)
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    return ReadPrompt(model=model, layers=recorder.layers, last_logits=logits)
