"""KVzip (Kim et al., NeurIPS 2025): keep what the model needs to repeat the text."""

import functools
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import wrong
from snapkv.policies.base import Need
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.states import PromptLayer
from snapkv.validation import require_int

INSTRUCTION = "\n\nRepeat the text above word for word:\n\n"
"""The instruction that `snapkv ask` and `snapkv eval` let the model read before every piece."""

_QUERIES_AT_ONCE = 64


@dataclass(frozen=True)
class KVzip(PrefixPolicy):
    """Lets the model repeat the text piece by piece, and keeps the tokens that it attends to most.

    A position's score is the highest attention that any query of the repetition pays it, in any
    head of the group. No question takes part, so the selection serves questions that are not known
    yet; `snapkv.kvzip.read_context` does the second reading. That costs as much as the first
    reading, attention over the whole text, and collecting the scores: three to four times one
    prefill. Here the softmax runs over the whole text, where the published code uses each piece's
    own part. `AdaKV(KVzip(...))` lets heads keep different numbers, as published.

    With `plus` it is KVzip+ (KVzap, arXiv 2601.07891): the attention of query i to position j
    counts times ``|W_O v_j| / |h_i|``. Both are Euclidean norms: of what the position adds to the
    layer's output per unit of attention, and of the query's input to attention after the norm
    before it, as in kvpress. So positions that hardly change the output are not kept.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        chunk_tokens: tokens of a piece.
        sink_tokens: first tokens that every head keeps, 4 as in kvpress. The published code keeps
            everything before the text, which begins with the system prompt. Repeating a text needs
            little of these tokens, but most heads rest their attention there.
        plus: weight attention by what it adds to the output.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a value is out of range.
    """

    name: ClassVar[str] = "kvzip"
    compares_layers: ClassVar[bool] = True
    query_tokens: ClassVar[int] = 0

    _: KW_ONLY
    chunk_tokens: int = 2048
    sink_tokens: int = 4
    plus: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("chunk_tokens", self.chunk_tokens, minimum=1)

    @property
    def needs(self) -> frozenset[Need]:
        """The name of the second reading, and with `plus` also that of the output weights."""
        needs: frozenset[Need] = frozenset({"reconstruction_pass"})
        return needs | {"output_weight"} if self.plus else needs

    def score(self, layer: PromptLayer) -> Tensor:
        """Return the highest attention that each position received in the second reading.

        Returns:
            (B, Hkv, P) float32, a view of `layer.received`.

        Raises:
            InvalidArgumentError: the text was read only once.
        """
        if layer.received is None:
            remedy = "Use snapkv.kvzip.read_context(model, input_ids, policy) to fill the cache"
            raise wrong("policy", "the method kvzip needs to read the prompt a second time", remedy)
        return layer.received[..., : layer.keys.shape[2] - self.window_size]


def most_attention(
    seen: PromptLayer,
    tokens: int,
    *,
    query_norms: Tensor | None = None,
    value_norms: Tensor | None = None,
) -> Tensor:
    """Return the highest attention that each position receives from any of the last queries.

    Args:
        seen: a layer; its queries are those of the last keys.
        tokens: how many of the first positions to return; all of them must come before the queries.
        query_norms: (B, N) float32, the norm that the attention of each of the N queries is divided
            by; None for no division.
        value_norms: (B, Hq, tokens) float32, the norm that the attention to each position is
            multiplied by; None for no multiplication.

    Returns:
        (B, heads of the cache, tokens) float32, the highest over the queries and over the query
        heads of a KV head.
    """
    blocks = ops.attention_weight_blocks(seen, _QUERIES_AT_ONCE)
    if query_norms is not None:
        norms = torch.split(query_norms[:, None, :, None], _QUERIES_AT_ONCE, dim=2)
        blocks = (block / norm for block, norm in zip(blocks, norms, strict=True))
    most = functools.reduce(torch.maximum, (block[..., :tokens].amax(dim=2) for block in blocks))
    if value_norms is not None:
        most = most * value_norms
    reduced: Tensor = ops.reduce_group(most, seen.num_kv_heads, "max")
    return reduced
