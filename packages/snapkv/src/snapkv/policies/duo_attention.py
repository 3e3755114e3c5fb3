"""DuoAttention (Xiao et al., 2024, arXiv 2410.10819): only retrieval heads keep everything."""

import functools
import os
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.policies.base import EvictingPolicy
from snapkv.policies.head_scores import HeadScores, head_scores
from snapkv.policies.spans import Spans
from snapkv.policies.states import DecodeStep, Eviction, LayerStates, PromptLayer, Selection
from snapkv.validation import require_finite, require_int, require_share

KEEP_HEADS = 0.5
"""The part of the heads that keeps everything, where scores decide and nobody says."""


@dataclass(frozen=True)
class DuoAttention(EvictingPolicy):
    """Retrieval heads keep the whole cache; streaming heads the first and the most recent tokens.

    Which is which is a property of the model (Sec. 2.2): a score for every KV head, of which the
    best `keep_heads` are retrieval heads. The prompt is read with full attention in all heads and
    then cut, so its first answer token is that of the full cache; from then on streaming heads drop
    a token for each that comes (Sec. 2.3). Nothing is scored while reading, and positions stay
    true. Heads of a layer that differ are stored one behind the other, without a gap.

    Without a pattern, `CompressedCache` takes what `snapkv study heads` has found of the model.

    Where this differs from others: the authors train the scores and let streaming heads see sinks
    and recent tokens only while the prompt is read, too; kvpress hides tokens of streaming heads at
    the end of the prompt only and keeps all that is generated. The authors break ties among scores
    at random; here the lower layer, then the lower head, comes first.

    Args:
        pattern: (layers, KV heads) scores, or the name of a file with them, see
            `snapkv.policies.head_scores.scores_in`. Layers are those that are compressed. Nothing
            but ones and zeros says by itself which heads keep everything.
        keep_heads: the part of all heads of the model that keeps everything, the highest scores
            first, in [0, 1]; 1 minus the authors' sparsity. Half if neither this nor `threshold`
            is given.
        threshold: instead of `keep_heads`, the score from which on a head keeps everything.
        sink_tokens: first tokens of every row that streaming heads keep.
        recent_tokens: last tokens that streaming heads keep, at least 1.

    Raises:
        InvalidArgumentError: a value out of range, both `keep_heads` and `threshold`, one of them
            beside ones and zeros, or a file that holds no such scores.
        InvalidTypeError: a value of the wrong type.
    """

    name: ClassVar[str] = "duo-attention"
    parts_heads: ClassVar[bool] = True
    query_tokens: ClassVar[int] = 0
    max_decode_tokens: ClassVar[None] = None

    pattern: HeadScores | str | os.PathLike[str] | None = field(default=None, repr=False)
    _: KW_ONLY
    keep_heads: float | None = None
    threshold: float | None = None
    sink_tokens: int = 64
    recent_tokens: int = 256

    def __post_init__(self) -> None:
        if self.pattern is not None:
            object.__setattr__(self, "pattern", head_scores("pattern", self.pattern))
        require_int("sink_tokens", self.sink_tokens, minimum=0)
        require_int("recent_tokens", self.recent_tokens, minimum=1)
        if self.keep_heads is not None:
            require_share("keep_heads", self.keep_heads, "0.5")
        if self.threshold is not None:
            require_finite("threshold", self.threshold, "pass a score such as 0.5")
        if self.keep_heads is not None and self.threshold is not None:
            raise InvalidArgumentError(
                f"keep_heads and threshold: expected one of them, got keep_heads="
                f"{self.keep_heads} and threshold={self.threshold}; leave one out"
            )
        for name in ("keep_heads", "threshold"):
            if self._says_by_itself and (value := getattr(self, name)) is not None:
                raise InvalidArgumentError(
                    f"{name}: expected none with a pattern of ones and zeros, which says by itself "
                    f"which heads keep everything, got {value}; leave {name} out, or pass scores"
                )

    def with_scores(self, scores: HeadScores) -> Self:
        """The same method with these scores."""
        return replace(self, pattern=scores)

    def require_heads(self, layers: int, kv_heads: int | None) -> None:
        """Raise unless the pattern has so many layers and heads; None where heads are not known."""
        rows = self._scores
        if len(rows) != layers or kv_heads not in (None, len(rows[0])):
            heads = "" if kv_heads is None else f" x {kv_heads} KV heads"
            raise InvalidArgumentError(
                f"pattern: expected scores of the {layers} layers{heads} that are compressed, got "
                f"{len(rows)} x {len(rows[0])}; pass those of this model, or find them with "
                "snapkv study heads"
            )

    @functools.cached_property
    def retrieval_heads(self) -> tuple[tuple[bool, ...], ...]:
        """For every layer and KV head whether it keeps everything."""
        rows = self._scores
        if self._says_by_itself:
            return tuple(tuple(score == 1 for score in row) for row in rows)
        if self.threshold is not None:
            return tuple(tuple(score >= self.threshold for score in row) for row in rows)
        places = [(layer, head) for layer, row in enumerate(rows) for head in range(len(row))]
        share = KEEP_HEADS if self.keep_heads is None else self.keep_heads
        best = sorted(places, key=lambda place: -rows[place[0]][place[1]])  # stable: lower first
        chosen = set(best[: round(share * len(places))])
        return tuple(
            tuple((layer, head) in chosen for head in range(len(row)))
            for layer, row in enumerate(rows)
        )

    def select(self, layer: PromptLayer) -> Selection:
        """Cut the streaming heads of the layer; nothing where all of them fit."""
        columns = torch.arange(layer.keys.shape[2], device=layer.keys.device)[None, None]
        kept, drops = self._kept(layer, columns, layer.keys.shape[2])
        if not drops:
            return Selection.whole(layer)
        return Selection.of_mask(kept, parts_heads=self._parts(layer))

    def evict(self, step: DecodeStep) -> Eviction:
        """Drop from the streaming heads what is no longer recent."""
        kept, drops = self._kept(step, step.columns, step.seen_tokens)
        return Eviction.of_mask(kept, parts_heads=self._parts(step)) if drops else Eviction()

    def require_protection(self, spans: Spans) -> None:
        """Never raise: there is no budget, streaming heads keep them beside their own."""

    @property
    def _scores(self) -> HeadScores:
        assert isinstance(self.pattern, tuple), "CompressedCache has asked for them"
        return self.pattern

    @property
    def _says_by_itself(self) -> bool:
        """Whether the pattern has nothing but ones and zeros."""
        rows = self.pattern if isinstance(self.pattern, tuple) else ()
        return bool(rows) and {score for row in rows for score in row} <= {0.0, 1.0}

    def _retrieves(self, layer: LayerStates) -> tuple[bool, ...]:
        """Which of the heads of a layer keep everything."""
        self.require_heads(layer.num_layers, layer.num_kv_heads)
        return self.retrieval_heads[layer.depth]

    def _parts(self, layer: LayerStates) -> bool:
        """Whether heads of the layer keep different numbers of tokens."""
        return len(set(self._retrieves(layer))) > 1

    def _kept(self, layer: LayerStates, columns: Tensor, seen_tokens: int) -> tuple[Tensor, bool]:
        """Which slots every head keeps, (B, H, S) bool, and whether that leaves out a token.

        `columns` is (B or 1, H or 1, S), below a row's pads where a slot holds no token.
        """
        pads = 0 if layer.pad_tokens is None else layer.pad_tokens[:, None, None]
        whole = torch.tensor(self._retrieves(layer), device=columns.device)[None, :, None]
        stays = (columns < pads + self.sink_tokens) | (columns >= seen_tokens - self.recent_tokens)
        if layer.protected is not None:
            stays = stays | layer.protected
        real = columns >= pads
        kept = real & (whole | stays)
        return kept.expand(layer.keys.shape[0], -1, -1), bool((kept != real).any())
