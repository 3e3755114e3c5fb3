"""Append buffers of fixed size, with which the decode steps of `generate` can be captured.

A cache usually grows by allocating new tensors, which a captured step cannot follow. While
`generate` decodes, the kept tokens stay where they are, and new tokens go into an append buffer
behind them that has free slots. When the call ends, the buffer is cut to its used slots and the
cache grows as usual.
"""

from typing import Any

FIRST_TOKENS = 256
"""The number of slots in the first append buffer; each further one has twice as many."""

LEAST_TOKENS = 8
"""The fewest tokens to generate for which capturing a step is worth its time."""


MOST_TIMES = 2
"""How often a change of the cache may end a captured step before all steps run eagerly."""


class AppendBuffers:
    """Allocates and releases the append buffers of a cache during one `generate` call.

    Args:
        cache: a `CompressedCache`.
        last: the most tokens the cache will have seen when `generate` ends; None if unknown.
        returns_weights: whether `generate` returns attention weights.
    """

    def __init__(self, cache: Any, last: int | None, *, returns_weights: bool) -> None:
        self._setup, self._prompt_state = cache.setup, cache.prompt_state
        self._last, self._returns_weights = last, returns_weights
        self._next, self._free, self._taken_back = FIRST_TOKENS, 0, 0
        self._tails: list[Any] = []  # the allocated append buffers, one per layer

    @property
    def obstacle(self) -> str:
        """The reason why append buffers cannot be used, or an empty string if they can be used."""
        setup, prompt_state = self._setup, self._prompt_state
        if setup.evicts:
            return f"{setup.policy.name} evicts after every token"
        if setup.other_layers:
            return f"{setup.model} has layers of another kind ({setup.other_names})"
        if setup.shares_latent:
            return f"the heads of {setup.model} share what is stored"
        if prompt_state.verifies_drafts:
            return "drafts are verified, whose number changes"
        if self._returns_weights:
            return "attention weights are returned"
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
        """The most tokens that can still come; 0 or less if that is not known."""
        return 0 if self._last is None else self._last - self._prompt_state.seen_tokens

    @property
    def is_lent(self) -> bool:
        """Whether every layer still uses the append buffer that was allocated for it.

        Some changes of the cache replace the buffers.
        """
        pairs = zip(self._prompt_state.layers, self._tails, strict=False)
        return bool(self._tails) and all(layer.store.tail is tail for layer, tail in pairs)

    def has_slots(self, new_tokens: int) -> bool:
        """Return whether `new_tokens` more tokens fit, and count them as written.

        Also counts how often the buffers were replaced by a change of the cache.
        """
        self._free -= new_tokens
        is_lent = self.is_lent
        self._taken_back += bool(self._tails) and not is_lent
        return self._free >= 0 and is_lent

    def allocate(self, new_tokens: int) -> None:
        """Allocate append buffers for at least the next `new_tokens` tokens, in all layers.

        If tokens are quantized, the tokens in the old buffer are quantized first, and the new
        buffer is not larger than the old one.
        """
        layers, coming = self._prompt_state.layers, self._coming
        if self._setup.quantize is not None:
            self.release()
        tokens = max(new_tokens, min(coming, self._next) if coming > 0 else self._next)
        for layer in layers:
            layer.take_room(tokens)
        self._tails, self._free = [layer.store.tail for layer in layers], tokens - new_tokens
        if self._setup.quantize is None:
            self._next *= 2

    def release(self) -> None:
        """Release the append buffers, so that every layer can grow as usual.

        The tokens that were written stay in the layers.
        """
        for layer, tail in zip(self._prompt_state.layers, self._tails, strict=False):
            if layer.store.tail is tail:
                layer.leave_room()
        self._free = 0
