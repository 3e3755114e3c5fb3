"""Prompts of token ids that are read once and compressed many times; see `snapkv.app.observing`.

`tests/quality` checks that the result equals a real compressed prefill bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapkv import CompressedCache
from snapkv.app.observing import RecordedPrompt, Recorder, record_prompt, record_prompt_twice
from snapkv.policies import EvictingPolicy, Policy

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


@dataclass(frozen=True, kw_only=True)
class Score:
    """One answer.

    Attributes:
        right: every token of the answer was the most likely one.
        nll: negative log-likelihood (nats) of the whole answer after its first token. Where the
            prompt ends in the question, the first token is predicted while the prompt is read,
            before anything is dropped.
    """

    right: bool
    nll: float


@torch.inference_mode()
def score_answer(
    prompt: ReadPrompt,
    cache: CompressedCache,
    answer_ids: list[int],
    *,
    question_ids: Sequence[int] = (),
) -> Score:
    """Score the answer behind a prompt whose cache this is; the answer is appended to it.

    A question that is not part of the prompt is read from the cache before the answer, in one
    pass, as `generate` reads it.
    """
    answer = torch.tensor(answer_ids, device=prompt.last_logits.device)
    before = prompt.last_logits
    if question_ids:
        question = torch.tensor([list(question_ids)], device=answer.device)
        before = _read(prompt.model, cache, question)[:, -1:]
    one_by_one = isinstance(cache.policy, EvictingPolicy)
    parts = answer[None, :-1].split(1 if one_by_one else len(answer_ids), dim=1)
    behind = torch.cat([_read(prompt.model, cache, part) for part in parts], dim=1)
    logits = torch.cat([before, behind], dim=1)[0]
    log_probabilities = logits.float().log_softmax(dim=-1)
    of_answer = log_probabilities.gather(1, answer[:, None])[:, 0]
    return Score(
        right=torch.equal(logits.argmax(dim=-1), answer),
        nll=-float(of_answer[1:].sum()),
    )


def _read(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """Logits (1, N, V) behind each of the tokens, which are read in one pass."""
    cache.expect_tokens(ids)
    logits: Tensor = model(ids, past_key_values=cache).logits
    return logits
