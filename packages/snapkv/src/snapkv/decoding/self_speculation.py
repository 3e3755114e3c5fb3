"""Self-speculation: the compressed cache drafts, the full cache verifies.

MagicDec (Chen et al., 2024), https://arxiv.org/abs/2408.11049. The drafts cost what decoding on the
compressed cache costs; the text is exactly the full cache's. The prompt is read once for both.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.report import tensor_bytes
from snapkv.decoding.speculation import Drafting, Request, Speculation, begin_verifying
from snapkv.decoding.tree import accept_sampled
from snapkv.errors import CacheMismatchError, InvalidArgumentError, UnsupportedModelError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.validation import require_int


class SelfSpeculation(Speculation):
    """Draft on the compressed cache that `generate` is given, verify on a full one beside it.

    ``model.generate(..., past_key_values=CompressedCache(model, SnapKV(512)),
    custom_generate=SelfSpeculation())``. Greedy text is the full cache's; with ``do_sample`` it is
    a sample of the full cache's distribution.

    Args:
        draft_tokens: how many tokens are drafted before they are verified together.

    Attributes:
        full_cache: the full cache of the last text.
    """

    full_cache: Cache | None = None

    def __init__(self, draft_tokens: int = 4) -> None:
        super().__init__()
        require_int("draft_tokens", draft_tokens, minimum=1)
        self.draft_tokens = draft_tokens

    @property
    def full_cache_bytes(self) -> int:
        """Bytes of the full cache's keys and values."""
        return sum(map(tensor_bytes, self.full_cache.layers if self.full_cache is not None else ()))

    @contextlib.contextmanager
    def drafting(self, request: Request) -> Iterator[Drafting]:
        """The drafts for one text."""
        self.full_cache = DynamicCache(config=request.model.config.get_text_config(decoder=True))
        yield _Drafts(request, self)


class _Beside(Cache):
    """A compressed cache that hands all it is given to a full one as well."""

    def __init__(self, cache: CompressedCache, full: Cache) -> None:
        super().__init__(layers=cache.layers)
        self._cache, self._full = cache, full

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._full.update(key_states, value_states, layer_idx, *args, **kwargs)
        return self._cache.update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return self._cache.get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self._cache.get_query_offset(layer_idx)


class _Drafts(Drafting):
    """The drafts of every step."""

    def __init__(self, request: Request, owner: SelfSpeculation) -> None:
        super().__init__(request)
        assert owner.full_cache is not None
        self._owner, self._full = owner, owner.full_cache
        self._drafted = 0
        self._before: dict[int, dict[str, Any]] = {}

    def start(self) -> Tensor:
        cache = self.request.cache
        if cache.get_seq_length():
            raise CacheMismatchError(
                f"past_key_values: expected an empty cache, since the full one beside it must see "
                f"the whole prompt, got one that has seen {cache.get_seq_length():,} tokens; call "
                "cache.reset()"
            )
        if any(hasattr(layer, "conv_states") for layer in cache.layers):
            raise UnsupportedModelError(
                f"model: expected layers that hold tokens where the full cache verifies beside the "
                f"compressed one, got states in {type(cache.model).__name__}; use Medusa or prompt "
                "lookup"
            )
        self._require_small_steps()
        logits = self.request.read_prompt(_Beside(cache, self._full), self._owner.draft_tokens)
        begin_verifying(self._full)
        return logits

    def _require_small_steps(self) -> None:
        """What a step appends is copied from the full cache, where windows hold only so much."""
        windows = [getattr(layer, "sliding_window", None) for layer in self._full.layers]
        smallest = min((window for window in windows if window), default=None)
        if smallest is not None and self._owner.draft_tokens + 1 >= smallest:
            raise InvalidArgumentError(
                f"draft_tokens: expected less than {smallest - 1}, since the model has a sliding "
                f"window of {smallest}, got {self._owner.draft_tokens}; draft fewer"
            )

    def verify(self, text: Tensor, most_drafts: int) -> tuple[list[int], int]:
        drafts, draft_logits = self._draft(text, min(most_drafts, self._owner.draft_tokens))
        self._drafted = len(drafts)
        both = torch.cat([text, drafts])
        unseen = both[len(text) - 1 :][None]
        raw = self.request.model(unseen, **passed(self._full), use_cache=True).logits[0]
        logits = torch.stack(
            [self.request.processed(both[: len(text) + n], row) for n, row in enumerate(raw)]
        )
        if self.request.samples and len(drafts):
            accepted, following = accept_sampled(
                drafts, torch.stack(draft_logits).softmax(dim=-1), logits.softmax(dim=-1)
            )
        else:
            fits = (drafts == logits[:-1].argmax(dim=-1)).long()
            accepted = int(fits.cumprod(dim=0).sum())
            following = self.request.choose(logits[accepted])
        return [*drafts[:accepted].tolist(), following], len(drafts)

    def _draft(self, text: Tensor, count: int) -> tuple[Tensor, list[Tensor]]:
        """(count,) int64 tokens behind a text, and the processed logits of each."""
        seen, logits = len(text), list[Tensor]()
        self._before = {  # a crop would not give back what a window held; updates make new tensors
            index: dict(vars(layer))
            for index, layer in enumerate(self.request.cache.layers)
            if not isinstance(layer, CompressedLayer)
        }
        for _ in range(count):
            output = self.request.model(
                text[-1:][None], **passed(self.request.cache), use_cache=True
            )
            logits.append(self.request.processed(text, output.logits[0, -1]))
            token = torch.tensor([self.request.choose(logits[-1])], device=text.device)
            text = torch.cat([text, token])
        self._owner.tally.draft_passes += count
        return text[seen:], logits

    def keep(self, tokens: int) -> None:
        """Both caches hold the text but its last token, the drafts' keys and values the full one's.

        Those know what the compressed cache has dropped, so the next drafts are better.
        """
        self._full.crop(tokens - 1 - self._drafted)
        for index, layer in enumerate(self.request.cache.layers):
            if index in self._before:
                vars(layer).update(self._before[index])
            else:
                layer.crop(-self._drafted)
            full = self._full.layers[index]
            if getattr(full, "keys", None) is not None:
                layer.update(full.keys[..., -tokens:, :], full.values[..., -tokens:, :])
