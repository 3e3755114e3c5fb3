"""Append buffers of fixed size, with which the decode steps of `generate` can be captured.

A cache usually grows by allocating new tensors, which a captured step cannot follow. While
`generate` decodes, the kept tokens stay where they are, and new tokens go into an append buffer
behind them that has free slots. When the call ends, the buffer is cut to its used slots and the
cache grows as usual.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from snapkv.storage.lent_tail import UsedSlots

FIRST_TOKENS = 256
"""The number of slots in the first append buffer; each further one has twice as many."""

LEAST_TOKENS = 8
"""The fewest tokens to generate for which capturing a step is worth its time."""

CAPTURED_TOKENS = 8
"""The most tokens of a pass that is captured. A longer one runs eagerly between captured ones."""

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
        self._next, self._drafts, self._taken_back = FIRST_TOKENS, 0, 0
        self._used: Any = None  # the `UsedSlots` of all tails
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
        """The largest number of tokens that may still be generated; 0 or less if it is unknown."""
        return 0 if self._last is None else self._last - self._prompt_state.seen_tokens

    @property
    def is_lent(self) -> bool:
        """Whether every layer still uses the append buffer that was allocated for it.

        Some changes of the cache replace the buffers.
        """
        pairs = zip(self._prompt_state.layers, self._tails, strict=False)
        return bool(self._tails) and all(layer.store.tail is tail for layer, tail in pairs)

    def have_room(self, new_tokens: int) -> bool:
        """Return whether the buffers have free slots for the next `new_tokens` tokens.

        Also counts how often the buffers were replaced by a change of the cache.

        Returns:
            False if there are too few free slots, the layers do not use the buffers any more, or
            they do not hold the queries that are needed once some of the tokens are removed.
        """
        is_lent, queries = self.is_lent, self._prompt_state.layers[0].queries
        self._taken_back += bool(self._tails) and not is_lent
        fits = is_lent and self._used.tokens + new_tokens <= self._used.slots
        # A single token is no draft, and is not removed in place.
        return fits and queries.can_write_back(new_tokens if new_tokens > 1 else 0)

    @contextlib.contextmanager
    def counting(self, new_tokens: int) -> Iterator[None]:
        """Count the tokens of the forward pass in this block, if it writes into the buffers.

        If the pass fails, only the layers that it has reached count them, so that the next pass is
        refused.
        """
        if not self.is_lent:
            yield
            return
        with self._used.counting(new_tokens):
            yield
        for tail in self._tails:
            tail.count = None

    def remove_drafts(self, tokens: int) -> bool:
        """Remove the last `tokens` tokens in place, if they are drafts of the last pass.

        Returns:
            Whether the tokens have been removed, so that captured passes stay valid.
        """
        if not self.is_lent or tokens >= max(1, self._used.drafts):
            return False
        if tokens:
            self._used.remove(tokens)
            for layer, tail in zip(self._prompt_state.layers, self._tails, strict=True):
                tail.clear(tokens)
                layer.queries.write_back(tokens)
        return True

    def allocate(self, new_tokens: int) -> None:
        """Allocate append buffers for at least the next `new_tokens` tokens, in all layers.

        If tokens are quantized, the tokens in the old buffer are quantized first, and the new
        buffer is not larger than the old one.
        """
        layers, coming = self._prompt_state.layers, self._coming
        if self._setup.quantize is not None:
            self.release()
        if self._prompt_state.verifies_drafts:
            # Drafts may go beyond the last token. If queries are held, a pass of more tokens than
            # this replaces the buffers; twice its length, because assistant models draft more and
            # more.
            self._drafts = max(self._drafts, CAPTURED_TOKENS, 2 * new_tokens)
        tokens = min(coming + self._drafts, self._next) if coming > 0 else self._next
        self._used = UsedSlots(max(new_tokens, tokens), layers[0].keys.device)
        for layer in layers:
            layer.allocate_append_buffer(self._used, self._drafts)
        self._tails = [layer.store.tail for layer in layers]
        if self._setup.quantize is None:
            self._next *= 2

    def release(self) -> None:
        """Release the append buffers, so that every layer can grow as usual.

        The tokens that were written stay in the layers.
        """
        for layer, tail in zip(self._prompt_state.layers, self._tails, strict=False):
            if layer.store.tail is tail:
                layer.release_append_buffer()
