"""What a task is: settings in, samples out, and a score for every answer."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least, require_each_at_least
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
        """The task with the settings that were left to the model."""
        del name, max_tokens
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the user's files was not read, a line each."""
        return ()

    @abstractmethod
    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Make or read the samples; the same ones in the same order every time."""

    @abstractmethod
    def score(self, sample: Sample, prediction: str) -> float:
        """How right an answer is, from 0 to 1."""

    def describe(self) -> dict[str, Any]:
        """The task's name and settings, ready for JSON."""
        settings = json.dumps({"name": self.name, **asdict(self)}, default=str)
        plain: dict[str, Any] = json.loads(settings)
        return plain

    def published(self, model: str) -> dict[str, dict[str, float]]:
        """Scores, 0 to 1, that a paper gives for that model: by method, then by the first axis."""
        del model
        return {}

    def require(self, **least: int) -> None:
        """Raise unless each of these settings, a number or several, is at least that."""
        for name, minimum in least.items():
            value = getattr(self, name)
            (require_each_at_least if isinstance(value, tuple) else require_at_least)(
                name, value, minimum
            )


def require_known_names(argument: str, given: Collection[str], known: Iterable[str]) -> None:
    """Raise unless they are some of those that are known, and at least one."""
    known = tuple(known)
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        raise InvalidArgumentError(
            f"{argument}: expected some of {', '.join(known)}, got {', '.join(unknown) or 'none'}; "
            "name those to run, or leave it out for all"
        )


Build = Callable[[int], Sample]
"""Makes a sample whose text has that many parts: lines, words, documents; always the same one."""


def fit_sample(
    build: Build, tokenizer: Any, length: int, *, least: int, most: int, hint: int | None = None
) -> tuple[Sample, int] | None:
    """The sample with most parts whose prompt and answer take `length` tokens, and how many parts.

    None where not even `least` parts fit. `hint` says how many fitted in a sample like this one.
    """
    parts = least
    if hint is None:
        while parts < most and needed_tokens(build(parts), tokenizer) <= length:
            parts = 2 * parts + 1
    else:
        parts = hint + hint // 8 + 1
    parts = max(least, min(parts, most))
    while True:
        sample = build(parts)
        used = needed_tokens(sample, tokenizer)
        if used <= length:
            return sample, parts
        if parts <= least:
            return None
        # A prompt holds something besides its parts, so that taking them away in proportion to the
        # excess comes down on the largest count that fits, as far as they are of one length.
        parts = max(least, min(parts - 1, parts * length // used))


def fit_samples(
    builds: Iterable[Build], tokenizer: Any, length: int, *, least: int, most: int, what: str
) -> Iterator[Sample]:
    """Samples of one length, each as `fitted` makes it; refused where `what` has no room."""
    hint = None
    for build in builds:
        found = fit_sample(build, tokenizer, length, least=least, most=most, hint=hint)
        if found is None:
            raise InvalidArgumentError(
                f"lengths: expected room for {what}, got {length} tokens; pass a larger length"
            )
        sample, hint = found
        yield sample


def needed_tokens(sample: Sample, tokenizer: Any) -> int:
    """Tokens of prompt and answer together, chat template included where the tokenizer has one."""
    prompt = sample.prompt(tokenizer, "tokenizer", "visible")
    return int(prompt.token_ids(tokenizer).shape[1]) + sample.settings.max_new_tokens


def even_percents(count: int) -> list[int]:
    """That many whole percents from 0 to 100, evenly; the middle for one."""
    return [50] if count == 1 else [round(100 * i / (count - 1)) for i in range(count)]
