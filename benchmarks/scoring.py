"""How well a model answers from a cache, with the right answer fed to it token by token."""

from dataclasses import dataclass

import torch

from benchmarks.reading import ReadPrompt
from snapkv import CompressedCache


@dataclass(frozen=True, kw_only=True)
class Score:
    """One answer.

    Attributes:
        right: every token of the answer was the most likely one.
        nll: negative log-likelihood (nats) of the whole answer after its first token. The first
            token is predicted while the prompt is read, before anything is dropped.
    """

    right: bool
    nll: float


@torch.inference_mode()
def score_answer(prompt: ReadPrompt, cache: CompressedCache, answer_ids: list[int]) -> Score:
    """Score the answer behind a prompt whose cache this is; the answer is appended to it."""
    answer = torch.tensor(answer_ids, device=prompt.last_logits.device)
    behind = prompt.model(answer[None, :-1], past_key_values=cache).logits
    logits = torch.cat([prompt.last_logits, behind], dim=1)[0]
    log_probabilities = logits.float().log_softmax(dim=-1)
    of_answer = log_probabilities.gather(1, answer[:, None])[:, 0]
    return Score(
        right=torch.equal(logits.argmax(dim=-1), answer),
        nll=-float(of_answer[1:].sum()),
    )
