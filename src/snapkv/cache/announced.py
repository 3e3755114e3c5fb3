"""What a cache is told about what it will read: where a prompt ends, and how it comes."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.static import StaticCompressedLayer
from snapkv.cache.token_ids import require_ids
from snapkv.errors import CacheMismatchError, InvalidArgumentError
from snapkv.policies import Policy
from snapkv.validation import require_int


class AnnouncedCache:
    """The part of a `CompressedCache` that listens to announcements.

    Attributes:
        prompt_end: tokens up to the end of the prompt or of the turn; None until it is known.
        turn_start: tokens before it.
        reads_piecewise: whether one layer after the other is reading.
        cap_tokens: the most that a layer holds of a prompt that is still coming in.
        ahead_tokens: how many tokens of the forward pass vote and are then forgotten.
    """

    policy: Policy
    layers: list[Any]
    options: dict[str, Any]
    prompt_end: int | None
    turn_start: int
    reads_piecewise: bool
    cap_tokens: int | None
    ahead_tokens: int
    _first: int
    _records_past: bool
    _looks_at_tokens: bool
    _coming: tuple[int, Tensor] | None
    _end_ids: tuple[int, ...] = ()

    if TYPE_CHECKING:

        def get_seq_length(self, layer_idx: int | None = None) -> int:
            """Tokens seen."""

        def crop(self, tokens_to_remove: int) -> None:
            """Forget the last tokens."""

    def _open_prompt(self, seen_tokens: int) -> int:
        """Where the prompt ends; without an announcement, with this very forward pass."""
        if self.prompt_end is None:
            if self._records_past:
                raise CacheMismatchError(
                    "past_key_values: expected to know where the prompt ends before drafts are "
                    "verified, got a first forward pass that may hold drafts; make the cache "
                    "before the line that calls model.generate, or call "
                    "cache.expect_prompt(prompt_tokens)"
                )
            self.turn_start, self.prompt_end = self.get_seq_length(), seen_tokens
        return self.prompt_end

    def expect_prompt(self, prompt_tokens: int) -> None:
        """Announce that the prompt ends after `prompt_tokens` tokens, those already seen included.

        `model.generate` does this by itself. Call it before feeding a prompt in pieces through
        ``model(...)``: nothing is dropped before the announced end has been read. On a cache that
        has read a prompt, it announces the end of the next turn.

        Raises:
            CacheMismatchError: the cache has already seen that many tokens.
        """
        require_int("prompt_tokens", prompt_tokens, minimum=1)
        seen = self.get_seq_length()
        if prompt_tokens <= seen:
            raise CacheMismatchError(
                f"past_key_values: expected a prompt longer than the {seen} tokens the cache has "
                f"already seen, got {prompt_tokens} tokens; call cache.reset() before a new prompt"
            )
        self.turn_start, self.prompt_end = seen, prompt_tokens
        self._open_turn(True)

    def _open_turn(self, is_open: bool) -> None:
        """Read the next tokens over all that was seen, in layers that can recall it."""
        for layer in self.layers:
            if isinstance(layer, CompressedLayer) and layer.parked is not None:
                dropped = layer.kept is not None
                layer.recall_due = dropped and (is_open or layer.stored_tokens == 0)

    def expect_tokens(self, token_ids: Tensor) -> None:
        """Announce the ids of the tokens of the next forward pass, pads included: (B, N) integers.

        `model.generate` does this by itself. Needed before every ``model(token_ids, ...)`` where
        the policy looks at tokens (`FastGen`); without effect where it does not.

        Raises:
            InvalidTypeError: not a tensor of that kind.
        """
        require_ids(token_ids)
        if self._looks_at_tokens:
            self._coming = (self.get_seq_length(), token_ids)

    @contextlib.contextmanager
    def announced(self, prompt_tokens: int, end_ids: tuple[int, ...] = ()) -> Iterator[None]:
        """Announce a prompt, and take the announcement back if nothing of it could be read.

        Args:
            prompt_tokens: where it ends, as for `expect_prompt`.
            end_ids: what ends a row's answer; what `generate` puts behind it are pads.
        """
        before, seen = self.prompt_end, self.get_seq_length()
        self.expect_prompt(prompt_tokens)
        self._end_ids = end_ids
        try:
            yield
        except BaseException:
            if self.get_seq_length() == seen:
                self.prompt_end = before
                self._open_turn(False)
            raise
        finally:
            self._end_ids = ()

    def without_ended_rows(self, visible: Tensor, token_ids: Tensor) -> Tensor:
        """The padding of a step of `generate`, without the pads behind answers that have ended.

        Only where a cache holds on to the queries of an answer, which vote at the end of the next
        turn. A method that evicts has counted the end of an answer apart from what follows it.

        Args:
            visible: (B, N), zero for pads.
            token_ids: (B, M), the last tokens of the same columns.
        """
        first = self.layers[self._first]
        assert self.prompt_end is not None
        generated = visible.shape[1] - self.prompt_end
        if not self._end_ids or not first.compresses_turns or generated < 2:
            return visible
        ids = token_ids[:, token_ids.shape[1] - generated :]
        ends = torch.isin(ids, torch.tensor(self._end_ids, device=ids.device))
        behind = (ends.cumsum(dim=-1) - ends.long()) > 0
        visible = visible.clone()
        visible[:, visible.shape[1] - generated :].masked_fill_(behind, 0)
        return visible

    @contextlib.contextmanager
    def reading_in_pieces(self, layer_idx: int, tokens: int) -> Iterator[None]:
        """Within this block one layer reads that many tokens in pieces, and no other does.

        Raises:
            InvalidArgumentError: the policy looks at tokens, which are announced all at once.
        """
        if self._looks_at_tokens:
            raise InvalidArgumentError(
                f"policy: expected one that does not look at tokens where a prompt is read layer "
                f"by layer, got {self.policy.name}; read it with prefill_chunk_size"
            )
        self._open_prompt(self.layers[layer_idx].get_seq_length() + tokens)
        self.reads_piecewise = True
        try:
            yield
        finally:
            self.reads_piecewise = False
        layer: Any = self.layers[layer_idx]
        if self.prompt_end is not None and layer.cumulative_length < self.prompt_end:
            layer.set_aside()

    @property
    def has_announcement(self) -> bool:
        """Whether it is known where the prompt or turn that comes next ends."""
        return self.prompt_end is not None and self.get_seq_length() < self.prompt_end

    @property
    def is_reading(self) -> bool:
        """Whether the end of the prompt has yet to be read."""
        first = self.layers[self._first]
        if isinstance(first, StaticCompressedLayer) and first.fixed:
            return False
        return self.prompt_end is None or first.get_seq_length() < self.prompt_end

    @contextlib.contextmanager
    def held_to(self, cap_tokens: int, coming_tokens: int) -> Iterator[None]:
        """Within this block every layer drops what is over the cap after every forward pass.

        Args:
            cap_tokens: the most that a layer holds of a prompt that is still coming in.
            coming_tokens: how many tokens the block reads; the prompt ends with them unless it was
                announced to end elsewhere.

        Raises:
            InvalidArgumentError: the policy cannot hold to the cap, or what it drops is recalled.
        """
        self.policy.require_cap(cap_tokens)
        if self.options["recall"] is not None:
            raise InvalidArgumentError(
                "recall: expected none where a prompt is held to a cap, got "
                f"{self.options['recall']}; read it with snapkv.prefill.layer_by_layer"
            )
        self._open_prompt(self.get_seq_length() + coming_tokens)
        self.cap_tokens = cap_tokens
        try:
            yield
        finally:
            self.cap_tokens = None

    def is_over_cap(self, coming_tokens: int) -> bool:
        """Whether layers will have to drop something when they have read that many tokens more."""
        held = self.layers[self._first].stored_tokens
        return self.cap_tokens is not None and held + coming_tokens > self.cap_tokens

    @contextlib.contextmanager
    def looking_ahead(self, tokens: int) -> Iterator[None]:
        """Within this block a piece of a prompt ends in the last tokens of the whole prompt.

        They vote on what is held of it, and are forgotten behind the block.

        Args:
            tokens: how many.
        """
        assert self.prompt_end is not None
        assert self.cap_tokens is not None
        end, cap = self.prompt_end, self.cap_tokens
        self.prompt_end, self.cap_tokens, self.ahead_tokens = end + tokens, cap + tokens, tokens
        try:
            yield
            self.crop(-tokens)
        finally:
            self.prompt_end, self.cap_tokens, self.ahead_tokens = end, cap, 0
