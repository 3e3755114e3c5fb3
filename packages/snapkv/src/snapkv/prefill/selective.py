"""Reading a prompt with fewer tokens from the middle of the model on.

After some layers only the tokens that the prompt's last ones vote for go further, at their true
positions: FastKV's token-selective propagation (arXiv 2502.01068, Sec. 3), with this package's
votes: pooled so that they fade forward, the mean over the query heads of a KV head and of these
means the highest, where the authors take the mean over all query heads. It is not exact: what does
not go on is lost for the upper layers, whatever is asked.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from snapkv.cache.prompt_state import Narrowing, Selector
from snapkv.errors import InvalidArgumentError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import cache_among
from snapkv.policies import PromptLayer, Selection, SnapKV
from snapkv.policies.budget import share_of
from snapkv.policies.prefix import Prefix
from snapkv.prefill.decoder import (
    at_places,
    decoder_layers,
    require_by_token,
    standing_in,
    tokens_of,
)
from snapkv.prefill.early_layer import default_early_layer
from snapkv.validation import SMALL_WINDOW, require_int

DEFAULT_KEEP_RATIO = 0.15
DEFAULT_LEAST_TOKENS = 256


@dataclass(frozen=True)
class _TokensThatGoOn(SnapKV):
    """The votes of all heads together, for one choice of tokens."""

    name: ClassVar[str] = "selective"

    _: KW_ONLY
    least_tokens: int = DEFAULT_LEAST_TOKENS

    def score(self, layer: PromptLayer) -> Tensor:
        """The highest over the KV heads of the mean over their query heads: (B, 1, P) float32."""
        return super().score(layer).amax(dim=1, keepdim=True)

    def counts(self, prefix: Prefix) -> list[int]:
        """The share, the least, and whatever is protected."""
        assert self.keep_ratio is not None
        protected = prefix.needed or [0] * len(prefix.lengths)
        return [
            min(tokens, max(share_of(tokens, self.keep_ratio), self.least_tokens, own))
            for tokens, own in zip(prefix.lengths, protected, strict=True)
        ]

    def choose(self, layer: PromptLayer) -> Selection | None:
        """Which tokens go on, for all heads; None for all of them."""
        with torch.no_grad():
            return self.select(replace(layer, queries=layer.queries[:, :, -self.query_tokens :]))


def _voting(keep_ratio: float, least_tokens: int) -> _TokensThatGoOn:
    return _TokensThatGoOn(
        keep_ratio=keep_ratio,
        window_size=SMALL_WINDOW,
        pooling="fading",
        least_tokens=least_tokens,
    )


def tokens_that_go_on(layer: PromptLayer, *, keep_ratio: float) -> Selection | None:
    """Which tokens of a prompt the votes of a layer would let go on after it; None for all."""
    return _voting(keep_ratio, least_tokens=0).choose(layer)


def _first_layer(model: PreTrainedModel, layer: int | None) -> int:
    """The first that only some tokens reach."""
    count = len(decoder_layers(model))
    if layer is not None:
        layer = require_int("layer", layer, minimum=1)
    first = default_early_layer(model) if layer is None else layer
    if not 1 <= first < count:
        raise InvalidArgumentError(
            f"layer: expected 1 to {count - 1}, a layer of the model's {count} after the "
            f"first, got {first}; about half of them serves most models"
        )
    return first


@contextlib.contextmanager
def selective(
    model: PreTrainedModel,
    *,
    layer: int | None = None,
    keep_ratio: float = DEFAULT_KEEP_RATIO,
    least_tokens: int = DEFAULT_LEAST_TOKENS,
) -> Iterator[None]:
    """Within this block prompts in a `CompressedCache` are read by all layers only in part.

        with selective(model):
            model.generate(ids, past_key_values=CompressedCache(model, SnapKV(1024)))

    Only the first prompt of a cache is read so, and only if it is longer than what would go on of
    it; later turns and other caches are read as ever. Only the logits of the tokens that went on
    are returned, those of the last token last. Rows of a padded batch choose by themselves, as they
    would alone.

    Args:
        model: a decoder-only transformers model whose layers all attend to the whole prompt.
        layer: how many layers read every token. By default as many as `snapkv study early-layer`
            has found for this model, else half of them. Fewer are faster, and lose more.
        keep_ratio: the share of the prompt before its last 16 tokens that goes on, in (0, 1]; the
            last 16 vote, and go on as well, and so do all tokens that are protected.
        least_tokens: so many go on where the share is fewer.

    Raises:
        InvalidArgumentError: a value out of range; from within the block, a prompt in pieces or
            with drafts, or a cache with recall or a policy that has to see all tokens.
        UnsupportedModelError: the model's layers cannot be found, or are of several kinds.
    """
    require_int("least_tokens", least_tokens, minimum=0)
    first, choose = _first_layer(model, layer), _voting(keep_ratio, least_tokens).choose
    decoder = model.get_decoder()
    forwards: dict[nn.Module, Callable[..., Any]] = {
        part: functools.partial(_read_layer, part.forward, index)
        for index, part in enumerate(decoder_layers(model))
    }
    forwards[decoder] = functools.partial(_read, first, choose, decoder.forward)
    with standing_in(forwards):
        yield


def _read(
    first_layer: int, choose: Selector, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The decoder's forward, some tokens of a first prompt going on."""
    cache = cache_among(kwargs)
    if not isinstance(cache, CompressedCache):
        return forward(*args, **kwargs)
    tokens, narrowing = tokens_of(args, kwargs), None
    if not cache.get_seq_length() and tokens > 1:
        _require_whole(cache, tokens)
        narrowing = Narrowing(first_layer=first_layer, prompt_tokens=tokens, choose=choose)
    with cache.prompt_state.narrowed(narrowing):
        return forward(*args, **kwargs)


def _require_whole(cache: CompressedCache, tokens: int) -> None:
    """Refuse a prompt that does not come at once and alone, or a cache that has to see all."""
    cache.setup.require("selective")
    end = cache.prompt_state.prompt_end
    if cache.prompt_state.verifies_drafts or (end is not None and end != tokens):
        raise InvalidArgumentError(
            f"input_ids: expected the whole prompt and nothing after it in one forward pass "
            f"where only some tokens go on, got {tokens:,} tokens of a prompt announced to "
            f"have {'another length' if end is None else f'{end:,}'}; leave out drafts and "
            "pieces, or read it with snapkv.prefill.layer_by_layer"
        )


def _read_layer(
    forward: Callable[..., Any], layer_idx: int, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """A layer's forward, of the tokens that reach it."""
    cache = cache_among(kwargs)
    narrowing = cache.prompt_state.narrowing if isinstance(cache, CompressedCache) else None
    places = None if narrowing is None else narrowing.places(layer_idx)
    if narrowing is None or places is None:
        return forward(hidden_states, *args, **kwargs)
    require_by_token(args, kwargs, narrowing.prompt_tokens)
    if hidden_states.shape[1] == narrowing.prompt_tokens:
        hidden_states = at_places(hidden_states, places)
    reached = {name: at_places(value, places) for name, value in kwargs.items()}
    return forward(hidden_states, **reached)
