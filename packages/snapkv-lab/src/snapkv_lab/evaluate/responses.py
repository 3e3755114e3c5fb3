"""Responses to requests that are known by a hash of what they ask, each asked once."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.store import Key, Progress, Store, short_hash

_QUESTION = "visible"
"""The setting of every response: a task's question votes, as part of its prompt."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked.

    Attributes:
        kind: of request.
        asked: its task and its places there, which its line in the folder begins with.
        content: all that the response depends on beside the run and the method.
    """

    kind: str
    asked: Sequence[Any]
    content: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Responses:
    """The responses of a method, out of the folder where it holds them.

    Attributes:
        method: what responds.
        store: where the responses are kept; what it holds is not asked again.
        on_progress: told how many requests have a response, before and behind every one.
    """

    method: Method
    store: Store
    on_progress: Progress | None = None

    def to(
        self,
        requests: Sequence[Request],
        *,
        what: str,
        alike: Callable[[int], Any],
        give: Callable[[Sequence[int]], Iterable[Any]],
    ) -> list[Any]:
        """A response to every request; each is on the disk before the next one is computed.

        Args:
            requests: in the order in which they are asked.
            what: is being done, for who is told of it.
            alike: of a request's place; neighbours for which it is equal are asked together.
            give: computes the responses to the requests at some places, one after the other.
        """
        keys = [self._key(request) for request in requests]
        places = {key: place for place, key in enumerate(keys) if key not in self.store}
        done = len(keys) - len(places)
        for _, group in itertools.groupby(sorted(places.values()), alike):
            together = list(group)
            self._tell(what, done, len(keys))
            for place, response in zip(together, give(together), strict=True):
                self._add(keys[place], response)
                done += 1
                self._tell(what, done, len(keys))
        return [self.store[key]["response"] for key in keys]

    def _key(self, request: Request) -> Key:
        """What a response is found by."""
        named = short_hash(vars(request), digits=16)
        return "/".join(map(str, [*request.asked, named])), self.method.label, _QUESTION

    def _add(self, key: Key, response: Any) -> None:
        named = dict(zip(("sample", "method", "question"), key, strict=True))
        own = {"policy": self.method.policy.describe(), "response": response}
        self.store.add(named | own)

    def _tell(self, what: str, done: int, total: int) -> None:
        if self.on_progress:
            self.on_progress(f"{what}, {self.method.label}", done, total)
