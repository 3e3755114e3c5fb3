"""Prompts of token ids that are read once and compressed many times; see `snapkv.app.recorded`.

`tests/quality` checks that the result equals a real compressed prefill bit for bit.
"""

from typing import Any

import torch

from snapkv.app.recorded import RecordedPrompt, Recorder, record_prompt, record_prompt_twice
from snapkv.policies import Policy

MOST_WINDOW_TOKENS = 64

ReadPrompt = RecordedPrompt


def read_prompt_twice(
    model: Any, prompt_ids: list[int], *, policy: Policy, instruction_ids: list[int]
) -> ReadPrompt:
    """Read one prompt and have the model repeat it, for policies like this one."""
    ids = torch.tensor([prompt_ids], device=model.device)
    return record_prompt_twice(model, ids, policy, instruction_ids=instruction_ids)


def read_prompt(
    model: Any, prompt_ids: list[int], *, recorded_queries: int = MOST_WINDOW_TOKENS
) -> ReadPrompt:
    """Read one prompt with the full cache, recording it and its last queries."""
    ids = torch.tensor([prompt_ids], device=model.device)
    return record_prompt(model, ids, Recorder(recorded_queries=recorded_queries))
