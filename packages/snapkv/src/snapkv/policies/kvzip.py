"""KVzip (Kim et al., NeurIPS 2025): keep what the model needs to say the text again."""

import functools
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv.policies.base import Need
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.states import PromptLayer
from snapkv.validation import require_int

INSTRUCTION = "\n\nRepeat the text above word for word:\n\n"
"""What `snapkv ask` and `snapkv eval` have the model read before every piece."""

_QUERIES_AT_ONCE = 64


@dataclass(frozen=True)
class KVzip(PrefixPolicy):
    """The model repeats the text piece by piece; what its queries attend to most is kept.

    A position's score is the highest attention that any query of the repetition pays it, in any
    head of the group. No question takes part, so the choice serves questions that are not known
    yet; `snapkv.kvzip.read_context` does the second reading. It costs as much as the
    first one, attention over the whole text, and noting it: three to four times one prefill. Here
    the softmax runs over the whole text, where the published code takes each piece's own part.
    `AdaKV(KVzip(...))` lets heads keep different numbers, as published.

    With `plus` it is KVzip+ (KVzap, arXiv 2601.07891): the attention of query i to position j
    counts times ``|W_O v_j| / |h_i|``. Both are Euclidean norms: of what the position adds to the
    layer's output per unit of attention, and of what the attention reads for the query, behind
    the norm before it, as in kvpress. So what hardly changes the output is not kept.

    Args:
        budget, keep_ratio, window_size: as in `PrefixPolicy`.
        chunk_tokens: tokens of a piece.
        sink_tokens: first tokens that every head keeps, 4 as in kvpress. The published code keeps
            all that stands before the text, which begins with the system prompt. Saying a text
            again asks for little of them, but most heads rest their attention there.
        plus: weigh attention by what it adds to the output.
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
        """A second reading; with `plus` the layer's output projection, too."""
        once: frozenset[Need] = frozenset({"reconstruction_pass"})
        return once | {"output_weight"} if self.plus else once

    def score(self, layer: PromptLayer) -> Tensor:
        """The most attention received in the second reading: (B, Hkv, P) float32."""
        if layer.received is None:
            raise InvalidArgumentError(
                "policy: expected one that chooses when the prompt has been read once, got kvzip, "
                "which needs a second reading; fill the cache with "
                "snapkv.kvzip.read_context(model, input_ids, policy)"
            )
        return layer.received[..., : layer.keys.shape[2] - self.window_size]


def most_attention(
    seen: PromptLayer,
    tokens: int,
    *,
    query_norms: Tensor | None = None,
    value_norms: Tensor | None = None,
) -> Tensor:
    """The most attention that any of the last queries pays to each of the first positions.

    Args:
        seen: a layer; its queries are those of the last keys.
        tokens: how many positions.
        query_norms: (B, N) float32, what the attention of each of the N queries is divided by.
        value_norms: (B, Hq, tokens) float32, what that of each position is multiplied by.

    Returns:
        (B, heads of the cache, tokens) float32, the highest over the queries and the group.
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
