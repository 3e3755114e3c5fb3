"""The settings of Medusa training, which the command line reads without importing torch."""

from dataclasses import asdict, dataclass

from snapkv.errors import wrong
from snapkv.validation import require_at_least


@dataclass(frozen=True, kw_only=True)
class MedusaTraining:
    """The settings for training Medusa heads. The same settings and documents continue a stopped
    run.

    Args:
        num_heads: how many tokens after the next one are predicted.
        answers: how many answers to train on; every tenth is held out for measurement.
        passage_tokens: length of the passage that an answer is about.
        max_new_tokens: length limit of an answer.
        batch: answers generated together.
        step_answers: answers per training step.
        epochs: passes over the answers.
        learning_rate: its peak; it rises over the first tenth and falls as a cosine.
        seed: random seed for the order of passages and answers.
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
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range.
            InvalidTypeError: a number other than the learning rate is not an integer.
        """
        minima = {"answers": 10, "max_new_tokens": self.num_heads + 2, "seed": 0}
        for name, value in asdict(self).items():
            if name != "learning_rate":
                require_at_least(name, value, minima.get(name, 1))
        if not 0 < self.learning_rate < 1:
            problem = f"expected a number between 0 and 1, but got {self.learning_rate}"
            raise wrong("learning_rate", problem, "For example, use 0.001")
