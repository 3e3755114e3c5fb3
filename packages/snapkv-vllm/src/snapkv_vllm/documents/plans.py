"""When requests are compressed that have to do with documents, by numbers of tokens alone.

KVzip reads a text twice (`snapkv.kvzip`): after the whole of it the model repeats it, piece by
piece, and what the pieces attend to is noted. A piece lies after the text in the cache and is
forgotten at its end. For vLLM such a request steps back by as many tokens as the piece has and
computes them again, as far as it knows; the workers put the piece's ids and positions in their
place, and its keys and values after the text's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from snapkv.errors import InvalidArgumentError
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.plans import LookaheadTokens, Order, ReconstructionPass, RequestPlan

STEP_TOKENS = 256
"""Tokens of a piece that one step reads: their queries of all layers wait until it is done."""


@dataclass(frozen=True, kw_only=True)
class FromDocument(RequestPlan):
    """The plan of a request whose prompt begins with a document, and which stays whole after it.

    `is_adopted`: another program has read it, whose numbers are not to the last bit those that
    other requests would compute.
    """

    prefix: CachedPrefix
    is_adopted: bool = False

    @property
    def prefix_tokens(self) -> int:
        """That the blocks stand for with which it begins."""
        return len(self.prefix.token_ids)

    @property
    def shared_tokens(self) -> int | None:
        return 0 if self.prefix.dropped_tokens or self.is_adopted else None

    @property
    def reusable_tokens(self) -> int:
        """See `RequestPlan`; what is reused is the document."""
        return 0

    def most_held(self, tokens: int) -> int:
        return tokens - self.prefix.dropped_tokens


@dataclass(kw_only=True)
class ReadTwice(RequestPlan):
    """The plan of a request that registers a document, which is its prompt but for one token.

    It remembers which piece is due. A request that is preempted begins with the first again.
    """

    prefix: CachedPrefix  # the text's T tokens, and how many stay, fewer than T
    instruction_ids: Sequence[int]  # stand before every piece
    chunk_tokens: int  # of the text, in one piece; at most T with the instruction
    choice: ReconstructionPass  # what chooses them
    _piece: int = field(default=0, init=False)

    @property
    def tokens(self) -> int:
        return len(self.prefix.token_ids)

    def piece(self, number: int) -> tuple[int, ...]:
        """The ids of a piece with its instruction; none after the last one."""
        start = number * self.chunk_tokens
        text = self.prefix.token_ids[start : start + self.chunk_tokens]
        return (*self.instruction_ids, *text) if text else ()

    def step_tokens(self, seen_tokens: int, held_tokens: int, offered_tokens: int) -> int:
        if held_tokens > seen_tokens:
            rest = len(self.piece(self._piece)) - (held_tokens - self.tokens)
            return min(offered_tokens, STEP_TOKENS, rest)
        if seen_tokens < self.tokens:
            return min(offered_tokens, self.tokens - seen_tokens)
        return offered_tokens

    def order(self, seen_tokens: int, held_tokens: int, step_tokens: int) -> Order | None:
        """See `RequestPlan`; at the end of the text, and of a piece, with the step back."""
        computed, held = seen_tokens + step_tokens, held_tokens + step_tokens
        rest, ahead = 0, None
        if held_tokens <= seen_tokens:
            if computed != self.tokens:
                return None
            self._piece = 0
        else:
            piece, read = self.piece(self._piece), held_tokens - self.tokens
            ids = piece[read : read + step_tokens]
            ahead = LookaheadTokens(first_position=held_tokens, token_ids=ids)
            rest = len(piece) - read - step_tokens
            self._piece += not rest
        back = 0 if rest else len(self.piece(self._piece))
        ends = not (rest or back)
        kept = self.prefix.kept_tokens if ends else self.tokens
        return Order(
            choice=self.choice,
            query_tokens=0 if ahead is None else len(ahead.token_ids),
            seen_tokens=computed - back,
            held_tokens=held,
            ends=ends,
            kept_tokens=held if rest else kept,
            ahead=ahead,
            steps_back=back,
            noted_tokens=0 if ahead is None else self.tokens,
        )

    def room(self, seen_tokens: int, held_tokens: int, step_tokens: int, block_tokens: int) -> int:
        """See `RequestPlan`; what is kept fills its blocks."""
        read = held_tokens + step_tokens - self.tokens
        is_last = not self.piece(self._piece + 1) and read == len(self.piece(self._piece))
        return self.prefix.kept_tokens if held_tokens > seen_tokens and is_last else 0

    @property
    def shared_tokens(self) -> int:
        return self.tokens

    @property
    def reusable_tokens(self) -> int:
        """See `RequestPlan`; one is left, after which the second reading begins."""
        return self.tokens - 1

    def most_held(self, tokens: int) -> int:
        return max(tokens, self.tokens + len(self.instruction_ids) + self.chunk_tokens)


def piece_tokens(text_tokens: int, instruction_tokens: int, most_tokens: int, room: int) -> int:
    """How much of a text one piece repeats, at most `most_tokens`.

    A request cannot step back by more than the text has, nor read after the `room` positions that
    the model has after it. Raises InvalidArgumentError where a text is too short or too long.
    """
    if text_tokens < 2 * instruction_tokens:
        raise InvalidArgumentError(
            f"document: expected at least {2 * instruction_tokens} tokens, twice as many as the "
            f"instruction to repeat it has, got {text_tokens}; ask about it without registering it"
        )
    if room < 2 * max(1, instruction_tokens):
        raise InvalidArgumentError(
            f"document: expected positions left to repeat it at, got {text_tokens:,} tokens with "
            f"{max(0, room):,} positions after them; shorten it, or raise --max-model-len"
        )
    return min(most_tokens, min(text_tokens, room) - instruction_tokens)
