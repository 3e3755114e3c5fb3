"""What a task is: settings in, samples out, and a score for every answer."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from snapkv_lab.evaluate.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """An experiment: a frozen dataclass of its settings.

    The fields of a subclass are its options on the command line, with the texts under ``Args:`` of
    its docstring as their help.

    Attributes:
        name: as on the command line.
        metric: what the score is called.
        axes: keys of the samples' cells: the first gives the columns of a table and the x axis of a
            figure, the second, where there is one, the y axis of a heat map.
        has_turns: whether its samples are conversations.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    has_turns: ClassVar[bool] = False

    def for_model(self, name: str, max_tokens: int | None) -> Self:
        """The task with the settings that were left to the model.

        Args:
            name: hub id, file or folder of the model.
            max_tokens: positions that it has; None where there is no limit.
        """
        del name, max_tokens
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the user's files was not read, a line each."""
        return ()

    @abstractmethod
    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Make or read the samples; the same ones in the same order every time.

        Raises:
            MissingDependencyError: data is in a package that is not installed.
            DocumentError: a file of data is missing or malformed.
        """

    @abstractmethod
    def score(self, sample: Sample, prediction: str) -> float:
        """How right an answer is, from 0 to 1."""

    def describe(self) -> dict[str, Any]:
        """The task's name and settings, ready for JSON."""
        plain: dict[str, Any] = json.loads(
            json.dumps({"name": self.name, **asdict(self)}, default=str)
        )
        return plain

    def published(self, model: str) -> dict[str, dict[str, float]]:
        """Scores, 0 to 1, that a paper gives for that model: by method, then by the first axis."""
        del model
        return {}


def data_hash(samples: Iterable[Sample]) -> str:
    """What the samples hold, as "sha256:..."."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(asdict(sample), sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()[:16]}"
