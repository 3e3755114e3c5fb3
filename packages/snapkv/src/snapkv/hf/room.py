"""Room that `generate` lends to a cache, so that its steps can be replayed without Python.

A cache grows by tensors of other shapes at other places, which no recording can follow. For as long
as a `generate` makes tokens, what heads keep stays where it is, and behind it lies a tail with room
for more. When the call is over the cache grows again, and holds no more than it has to.
"""

from typing import Any

FIRST_TOKENS = 256
"""What there is room for first; twice as much every time that it runs out."""

LEAST_TOKENS = 8
"""Of fewer tokens an answer is over before it is worth recording a step."""


MOST_TIMES = 2
"""That a change of the cache may end a recorded step, before the rest runs eagerly."""


class Room:
    """Lends room to the layers of a cache.

    Args:
        cache: a `CompressedCache`.
        last: tokens seen when `generate` is over at the latest; None where it does not say.
        asks_weights: whether it returns attention weights.
    """

    def __init__(self, cache: Any, last: int | None, *, asks_weights: bool) -> None:
        self._setup, self._prompt_state = cache.setup, cache.prompt_state
        self._last, self._asks_weights = last, asks_weights
        self._next, self._free, self._taken_back = FIRST_TOKENS, 0, 0
        self._tails: list[Any] = []  # that it has lent, one a layer

    @property
    def obstacle(self) -> str:
        """Why none can be lent; empty where it can."""
        setup, prompt_state = self._setup, self._prompt_state
        if setup.evicts:
            return f"{setup.policy.name} evicts after every token"
        if setup.other_layers:
            return f"{setup.model} has layers of another kind ({setup.other_names})"
        if setup.shares_latent:
            return f"the heads of {setup.model} share what is stored"
        if prompt_state.verifies_drafts:
            return "drafts are verified, as many as there are"
        if self._asks_weights:
            return "attention weights are asked for"
        if not self._tails and 0 < self._coming < LEAST_TOKENS:
            return f"fewer than {LEAST_TOKENS} tokens may come"
        if self._taken_back > MOST_TIMES:
            return "the cache is changed while tokens are made"
        queries = prompt_state.layers[0].queries
        if history := queries.history_tokens:
            held = queries.last
            if prompt_state.looks_at_tokens or held is None or held.shape[2] < history:
                return "the tokens to come may vote with the next prompt"
        return ""

    @property
    def _coming(self) -> int:
        """Tokens that may come; not above zero where that is not known."""
        return 0 if self._last is None else self._last - self._prompt_state.seen_tokens

    @property
    def is_lent(self) -> bool:
        """Whether all of it still is: what changes the cache otherwise leaves it first."""
        lent = zip(self._prompt_state.layers, self._tails, strict=False)
        return bool(self._tails) and all(layer.store.tail is tail for layer, tail in lent)

    def has_slots(self, new_tokens: int) -> bool:
        """Whether so many fit in; they are then counted as written."""
        self._free -= new_tokens
        is_lent = self.is_lent
        self._taken_back += bool(self._tails) and not is_lent
        return self._free >= 0 and is_lent

    def take(self, new_tokens: int) -> None:
        """Take room for at least so many tokens, the next ones.

        In few bits what came before is encoded first, and there is no more of it than before.
        """
        layers, coming = self._prompt_state.layers, self._coming
        if self._setup.quantize is not None:
            self.leave()
        tokens = max(new_tokens, min(coming, self._next) if coming > 0 else self._next)
        for layer in layers:
            layer.take_room(tokens)
        self._tails, self._free = [layer.store.tail for layer in layers], tokens - new_tokens
        if self._setup.quantize is None:
            self._next *= 2

    def leave(self) -> None:
        """Let every layer grow again that has this room."""
        for layer, tail in zip(self._prompt_state.layers, self._tails, strict=False):
            if layer.store.tail is tail:
                layer.leave_room()
        self._free = 0
