"""This process answers."""

from collections.abc import Iterator, Sequence

from snapkv_lab.evaluate.asking import Answerer, Asked
from snapkv_lab.evaluate.store import Record
from snapkv_lab.evaluate.workers.base import Executor


class Serial(Executor):
    """One after the other, in the order in which they are asked."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerer = answerer

    def answers(self, work: Sequence[Asked]) -> Iterator[Record]:
        """See `Executor.answers`."""
        for asked in work:
            yield from self._answerer.records(asked)

    def __exit__(self, *error: object) -> None:
        """Nothing has to end."""
