"""Room that `generate` lends to a growing cache, so that its steps can be replayed without Python.

A cache grows by tensors of other shapes at other places, which no recording can follow. For as long
as a `generate` makes tokens, what heads keep stays where it is, and behind it lies a tail with room
for more. When the call is over the cache grows again, and holds no more than it has to.
"""

from typing import Any

from transformers import GenerationConfig

FIRST_TOKENS = 256
"""What there is room for first; twice as much every time that it runs out."""

LEAST_TOKENS = 8
"""Of fewer tokens an answer is over before it is worth recording a step."""


class Room:
    """Lends room to the layers of a cache.

    Args:
        cache: a `CompressedCache` that grows.
        config: what `generate` was asked for.
    """

    def __init__(self, cache: Any, config: GenerationConfig) -> None:
        self._setup, self._prompt_state = cache.setup, cache.prompt_state
        self._asks_weights = bool(config.output_attentions)
        self._last: int | None = config.max_length
        self._next, self._free = FIRST_TOKENS, 0

    @property
    def obstacle(self) -> str:
        """Why none can be lent; empty where it can."""
        setup, prompt_state = self._setup, self._prompt_state
        left = None if self._last is None else self._last - prompt_state.seen_tokens
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
        is_first = self._next == FIRST_TOKENS
        if is_first and left is not None and left < LEAST_TOKENS:
            return f"fewer than {LEAST_TOKENS} tokens may come"
        layer = prompt_state.layers[0]
        if history := layer.history_tokens:
            held = layer.last_queries
            if prompt_state.looks_at_tokens or held is None or held.shape[2] < history:
                return "the tokens to come may vote with the next prompt"
        return ""

    def has_slots(self, new_tokens: int) -> bool:
        """Whether so many fit in; they are then counted as written."""
        self._free -= new_tokens
        return self._free >= 0

    def take(self, new_tokens: int) -> None:
        """Take room for at least so many tokens, the next ones."""
        layers = self._prompt_state.layers
        wanted = self._next if self._last is None else self._last - self._prompt_state.seen_tokens
        tokens = max(new_tokens, min(wanted, self._next))
        for layer in layers:
            layer.take_room(tokens)
        self._next, self._free = 2 * self._next, tokens - new_tokens

    def leave(self) -> None:
        """Let every layer grow again."""
        for layer in self._prompt_state.layers:
            layer.leave_room()
        self._free = 0
