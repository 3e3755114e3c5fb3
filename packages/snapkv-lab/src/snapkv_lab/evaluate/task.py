"""The base class of tasks, which turn settings into samples and score every answer."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from snapkv.errors import wrong
from snapkv.validation import require_at_least, require_each_at_least
from snapkv_lab.evaluate.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task of the evaluation, as a frozen dataclass of its settings.

    The fields of a subclass are its options on the command line, with the texts under ``Args:`` of
    its docstring as their help.

    Attributes:
        name: the name on the command line.
        metric: the name of the score.
        axes: keys of the samples' cells. The first gives the columns of a table and the x axis of a
            figure, and the second, if there is one, the y axis of a heat map.
        has_turns: whether its samples are conversations.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    has_turns: ClassVar[bool] = False

    def for_model(self, name: str, max_tokens: int | None) -> Self:
        """Return the task with the settings that depend on the model filled in.

        Most tasks have no setting that depends on it, and return themselves.

        Args:
            name: a hub id of the model, or its folder.
            max_tokens: the number of positions of the model; None if they are not limited.
        """
        del name, max_tokens
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """One message for each of the user's files that could not be read."""
        return ()

    @abstractmethod
    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Yield all samples of the task, always in the same order.

        Raises:
            InvalidArgumentError: a length has no room for a sample, or the data has too few.
            MissingDependencyError: the package with the data is not installed.
            DocumentError: a file of the user is missing or has another form.
        """

    @abstractmethod
    def score(self, sample: Sample, prediction: str) -> float:
        """Return the score of an answer, which is a number between 0 and 1."""

    def describe(self) -> dict[str, Any]:
        """Return the name and the settings of the task as a new dictionary for JSON.

        Tuples become lists, and values that JSON does not know become strings.
        """
        settings = json.dumps({"name": self.name, **asdict(self)}, default=str)
        plain: dict[str, Any] = json.loads(settings)
        return plain

    def published(self, model: str) -> dict[str, dict[str, float]]:
        """Return the scores that a paper has published for the model, to be shown next to the
        measured ones.

        Returns:
            A dict of the scores, from 0 to 1, by the value of the first axis, for each name of a
            method. It is empty if there are none.
        """
        del model
        return {}

    def require(self, **least: int) -> None:
        """Check that settings of the task are integers in an allowed range.

        Args:
            least: the smallest allowed value of each setting, by the name of its field. The setting
                is an integer or a tuple of integers. No number may be larger than 2**24.

        Raises:
            InvalidArgumentError: a number is out of range, or a tuple is empty.
            InvalidTypeError: a value is not an integer.
        """
        for name, minimum in least.items():
            value = getattr(self, name)
            (require_each_at_least if isinstance(value, tuple) else require_at_least)(
                name, value, minimum
            )


def require_known_names(argument: str, names: Collection[str], known: Iterable[str]) -> None:
    """Check that at least one name is given and that all names are known.

    Args:
        argument: the name of the setting, for the error message.
        names: the names to check.
        known: all names that are allowed.

    Raises:
        InvalidArgumentError: no name is given, or an unknown one.
    """
    known = tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        problem = f"expected some of {', '.join(known)}, but got {', '.join(unknown) or 'none'}"
        raise wrong(
            argument, problem, "Use some of these values, or remove this option to use all of them"
        )


Build = Callable[[int], Sample]
"""Makes a sample whose text has the given number of parts, such as lines, words or documents. The
same number always gives the same sample.
"""


def fit_sample(
    build: Build, tokenizer: Any, length: int, *, least: int, most: int, hint: int | None = None
) -> tuple[Sample, int] | None:
    """Find the largest sample that fits into the given number of tokens.

    Each size that is tried is built and tokenized. A sample is the largest if all of its parts have
    equal lengths; otherwise a slightly larger one may fit, too.

    Args:
        build: makes the sample from a number of parts.
        tokenizer: counts the tokens.
        length: the most tokens of prompt and answer together.
        least: the smallest number of parts.
        most: the largest number of parts.
        hint: the number of parts that fitted in a similar sample, which makes the search faster;
            the result has at most an eighth more parts than this, plus one.

    Returns:
        The sample and its number of parts, or None if not even `least` parts fit.
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
        # A prompt holds more than its parts. If the parts have equal lengths, removing them in
        # proportion to the excess ends at the largest count that fits.
        parts = max(least, min(parts - 1, parts * length // used))


def fit_samples(
    builds: Iterable[Build], tokenizer: Any, length: int, *, least: int, most: int, what: str
) -> Iterator[Sample]:
    """Yield the largest samples that fit into the given number of tokens: one for each of `builds`,
    in the same order. See `fit_sample`.

    Args:
        builds: functions that make similar samples; the size of each is the hint for the next.
        tokenizer: counts the tokens.
        length: the most tokens of prompt and answer together.
        least: the smallest number of parts.
        most: the largest number of parts.
        what: what a sample with `least` parts consists of, for the error message.

    Raises:
        InvalidArgumentError: not even a sample with `least` parts fits. Samples before it have been
            yielded.
    """
    hint = None
    for build in builds:
        fitted = fit_sample(build, tokenizer, length, least=least, most=most, hint=hint)
        if fitted is None:
            problem = f"the length must be large enough for {what}, but got {length} tokens"
            raise wrong("lengths", problem, "Use a larger length")
        sample, hint = fitted
        yield sample


def needed_tokens(sample: Sample, tokenizer: Any) -> int:
    """Return the number of tokens in the prompt and the longest allowed answer together. The
    question is visible, and the chat template is included if the tokenizer has one and the sample
    allows it.
    """
    prompt = sample.prompt(tokenizer, "tokenizer", "visible")
    return int(prompt.token_ids(tokenizer).shape[1]) + sample.settings.max_new_tokens


def even_percents(count: int) -> list[int]:
    """Return `count` evenly spaced whole percentages from 0 to 100, in ascending order.

    A single percentage is 50.
    """
    return [50] if count == 1 else [round(100 * i / (count - 1)) for i in range(count)]
