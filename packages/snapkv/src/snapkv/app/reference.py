"""The loss of a reference: how far a model, behind what was kept of a prompt, is from saying it.

A score that counts right answers has no signal where a model is never right, or always; the loss
of the right answer has one. It is taken in the cache that the answer was generated from, as it was
when the prompt had been read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from snapkv.app.likelihood import log_probabilities
from snapkv.app.models import LoadedModel
from snapkv.app.prompt_end import PromptEnd
from snapkv.app.prompts import Prompt
from snapkv.plan import out_of_memory_explained


@dataclass(frozen=True, kw_only=True)
class References:
    """The right answers to a prompt, as tokens."""

    token_ids: Sequence[Sequence[int]]

    @classmethod
    def behind(cls, prompt: Prompt, references: Sequence[str], loaded: LoadedModel) -> "References":
        """As the model would go on: a space goes before them where a word would begin with one."""
        tokenizer = loaded.tokenizer
        before: list[int] = prompt.encoded(tokenizer, prompt.text)["input_ids"]
        ends_in_marker = not tokenizer.decode(before[-1:], skip_special_tokens=True)
        joined = ends_in_marker or prompt.text[-1:].isspace()
        found = []
        for reference in references:
            text = reference if joined or reference[0].isspace() else f" {reference}"
            whole: list[int] = prompt.encoded(tokenizer, prompt.text + text)["input_ids"]
            own = whole[len(before) :]
            if whole[: len(before)] != before or not own:  # a token lies over the prompt's end
                own = tokenizer(text, add_special_tokens=False)["input_ids"]
            found.append(own)
        return cls(token_ids=found)

    def loss(self, loaded: LoadedModel, end: PromptEnd) -> float | None:
        """Mean negative log-likelihood of the likeliest, in nats per token."""
        longest = end.cache.get_seq_length() + max(map(len, self.token_ids))
        if not all(self.token_ids):
            return None
        if loaded.max_tokens is not None and longest > loaded.max_tokens:
            return None
        with out_of_memory_explained(lambda: ""), torch.inference_mode():
            losses = [_loss(loaded, end.branch(), ids) for ids in self.token_ids]
        return min(losses) if all(map(math.isfinite, losses)) else None


def _loss(loaded: LoadedModel, end: PromptEnd, token_ids: Sequence[int]) -> float:
    ids = torch.tensor([token_ids], device=loaded.model.device)
    chosen, _ = log_probabilities(loaded.model, end, ids)
    return -float(chosen.mean())
