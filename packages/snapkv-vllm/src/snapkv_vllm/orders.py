"""What the scheduler tells the workers about one step; no vLLM is needed here."""

from collections.abc import Sequence
from dataclasses import dataclass

from snapkv_vllm.choices import Choice
from snapkv_vllm.heads.places import held_tokens


@dataclass(frozen=True, kw_only=True)
class Move:
    """Where the blocks of a request lie before and after it is compressed.

    Attributes:
        group: index of vLLM's KV cache group.
        sources: the blocks that hold its tokens.
        targets: the blocks that hold the kept tokens; some of the sources, or others.
    """

    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Tokens that are read behind a prompt's own, and forgotten when they have voted.

    The prompt's last ones behind a piece of it, or a part of a text that is read again.

    Attributes:
        first_position: the true position of the first of them.
        token_ids: their ids.
    """

    first_position: int
    token_ids: tuple[int, ...]

    @property
    def rows(self) -> tuple[Sequence[int], Sequence[int]]:
        """Ids and true positions."""
        first = self.first_position
        return self.token_ids, range(first, first + len(self.token_ids))


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the workers do with one request in the step that carries the order.

    Attributes:
        choice: what chooses the tokens that stay.
        query_tokens: how many of the request's last tokens in this step have queries that the
            choice wants, which are put aside.
        seen_tokens: that count as computed when the step is done.
        held_tokens: of which keys and values are cached then, those read ahead among them.
        ends: whether the choice is made behind this step; what was put aside is then forgotten.
        kept_tokens: how many stay.
        ahead: what the last tokens of the step are, where they are not the next ones.
        steps_back: how many tokens fewer than have been computed count as computed from then on.
        noted_tokens: of how many first tokens the attention is noted that the queries pay them.
        moves: what happens to the blocks of each compressed KV cache group.
    """

    choice: Choice
    query_tokens: int
    seen_tokens: int
    held_tokens: int
    ends: bool
    kept_tokens: int
    ahead: Ahead | None = None
    steps_back: int = 0
    noted_tokens: int = 0
    moves: tuple[Move, ...] = ()

    @property
    def parts_heads(self) -> bool:
        """Whether the heads of a layer keep different numbers of tokens."""
        return self.choice.parts_heads

    def room_tokens(self, block_tokens: int) -> int:
        """Tokens to count for what stays, in blocks of so many."""
        return room_tokens(self.choice, self.kept_tokens, self.held_tokens, block_tokens)

    @property
    def dropped_tokens(self) -> int:
        """Of all tokens seen, how many are held no more when the request has been compressed."""
        return self.seen_tokens - self.kept_tokens


def room_tokens(choice: Choice, kept: int, held: int, block_tokens: int) -> int:
    """Tokens to count for those that a choice keeps of what is held, in blocks of so many."""
    if choice.parts_heads and not choice.fills_pages:
        return held_tokens(kept, held, block_tokens)
    return kept


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What workers are told of a request that begins with a document.

    Attributes:
        document_tokens: that count as computed.
        kept_tokens: that are held of those, per KV head.
        first_block: in the first of the compressed KV cache groups, which tells documents apart.
        parts_heads: whether the heads of a layer hold different numbers of tokens.
    """

    document_tokens: int
    kept_tokens: int
    first_block: int
    parts_heads: bool

    @property
    def dropped_tokens(self) -> int:
        """Tokens of the document that are not held."""
        return self.document_tokens - self.kept_tokens
