"""Settings of generation and training; importable without torch, for the command line."""

import math
from dataclasses import asdict, dataclass

from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least, require_int

MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by the temperature overflow in half precision."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How an answer is generated."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: greedy; from 0.001 on: sampling
    seed: int = 0
    min_new_tokens: int = 0  # the token that ends the answer not counted
    stop_token_ids: tuple[int, ...] = ()  # end an answer, as the model's own end tokens do
    stop_strings: tuple[str, ...] = ()  # neither they nor what follows is part of the answer

    def __post_init__(self) -> None:
        require_int("max_new_tokens", self.max_new_tokens, minimum=1)
        require_int("seed", self.seed, minimum=0)
        require_int("min_new_tokens", self.min_new_tokens, minimum=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidArgumentError(
                f"min_new_tokens: expected at most max_new_tokens={self.max_new_tokens}, got "
                f"{self.min_new_tokens}; pass a smaller number"
            )
        if "" in self.stop_strings:
            raise InvalidArgumentError(
                "stop_strings: expected texts, got an empty one, which ends every answer at once; "
                "leave it out"
            )
        drawn = math.isfinite(self.temperature) and self.temperature >= MIN_TEMPERATURE
        if self.temperature != 0 and not drawn:
            raise InvalidArgumentError(
                f"temperature: expected 0, or a finite number of at least {MIN_TEMPERATURE}, got "
                f"{self.temperature}; pass 0 for greedy decoding, or 1"
            )


@dataclass(frozen=True, kw_only=True)
class MedusaTraining:
    """How heads are trained; the same plan and documents continue a run that was stopped.

    Args:
        num_heads: how many tokens after the next one are predicted.
        answers: how many answers to train on; every tenth is held out for measurement.
        passage_tokens: length of the passage that an answer is about.
        max_new_tokens: length limit of an answer.
        batch: answers generated together.
        step_answers: answers per training step.
        epochs: passes over the answers.
        learning_rate: its peak; it rises over the first tenth and falls as a cosine.
        seed: of the order of passages and answers.
    """

    num_heads: int = 3
    answers: int = 4096
    passage_tokens: int = 256
    max_new_tokens: int = 256
    batch: int = 16
    step_answers: int = 4
    epochs: int = 2
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        minima = {"answers": 10, "max_new_tokens": self.num_heads + 2, "seed": 0}
        for name, value in asdict(self).items():
            if name != "learning_rate":
                require_at_least(name, value, minima.get(name, 1))
        if not 0 < self.learning_rate < 1:
            raise InvalidArgumentError(
                f"learning_rate: expected between 0 and 1, got {self.learning_rate}; pass 0.001"
            )
