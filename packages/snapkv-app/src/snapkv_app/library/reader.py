"""Read documents into separate caches, and load those again."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import CacheFileError, InvalidArgumentError, PromptTooLongError
from snapkv.hf import saved
from snapkv.hf.cache import CompressedCache
from snapkv.hf.model_parts import max_positions
from snapkv.hf.placement import device_of
from snapkv.kvzip import read_as_wanted
from snapkv.policies import FullCache
from snapkv_app.control_words import control_tokens
from snapkv_app.library.about import About, document_ids
from snapkv_app.library.joining import Part
from snapkv_app.library.records import Text
from snapkv_app.plan.advice import prompt_memory_explained


class Reader:
    """A model that reads documents the way a library says."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, about: About) -> None:
        self.about = about
        self._model, self._tokenizer = model, tokenizer
        self._policy = about.made_policy(tokenizer)

    def empty_cache(self, *, protect_prefix: bool = False) -> CompressedCache:
        """A cache for one document; refused where the model cannot be compressed correctly.

        Where all heads keep the prefix, they still hold as many tokens each without it, since it
        stands once before several documents.
        """
        protect = [(0, len(self.about.prefix_ids))] if protect_prefix else None
        return CompressedCache(self._model, self._policy, protect=protect)

    def read(self, text: Text) -> Part:
        """Read a document after the prefix; a policy that needs it gets a second reading."""
        ids = self._ids(text)
        with prompt_memory_explained(self._model, ids.shape[1]):
            cache = self._filled(ids)
        return Part(input_ids=ids, cache=cache, prefix_tokens=len(self.about.prefix_ids))

    def save(self, part: Part, path: Path) -> None:
        """Write a document to a file, in the library's bits."""
        cache, beside = part.cache, {"input_ids": part.input_ids}
        codes, identity = self.about.codes, self.about.model
        saved.write(cache, cache.options, path, beside, codes, identity, sweep=False)

    def load(self, path: Path) -> Part:
        """A document out of its file; refused unless that is as it was written, and read as text.

        Versions before 0.3.0 read a document's control words as control tokens.
        """
        own = self._policy if self._policy.needs else None
        cache, beside = saved.read(
            CompressedCache, path, self._model, own, identity=self.about.model
        )
        ids = beside["input_ids"].to(device_of(self._model))
        read = ids[0, len(self.about.prefix_ids) :].tolist()
        if control_tokens(self._tokenizer, read):
            raise CacheFileError(
                f"path: expected a document that was read as text, got control tokens in {path}; "
                "read the document again"
            )
        return Part(input_ids=ids, cache=cache, prefix_tokens=len(self.about.prefix_ids))

    def own_ids(self, text: Text) -> list[int]:
        return document_ids(self._tokenizer, text.name, text.text)

    def _ids(self, text: Text) -> Tensor:
        """(1, T) int64, the prefix and the document."""
        own = self.own_ids(text)
        positions, tokens = max_positions(self._model), len(self.about.prefix_ids) + len(own)
        if positions is not None and tokens >= positions:
            raise PromptTooLongError(
                f"document: expected fewer tokens than the model's {positions:,} positions, got "
                f"{tokens:,} in {text.name!r}; split it, read its best passages with snapkv ask "
                "--passages 4k, or choose a model with more positions"
            )
        return torch.tensor([[*self.about.prefix_ids, *own]], device=device_of(self._model))

    def _filled(self, ids: Tensor) -> CompressedCache:
        """What has read the document; where the budget has room for the prefix, that stays."""
        if self.about.prefix_ids and not isinstance(self._policy, FullCache):
            try:
                return self._fill(self.empty_cache(protect_prefix=True), ids)
            except InvalidArgumentError:
                pass  # so short a document, or so small a budget; what else is wrong is said below
        return self._fill(self.empty_cache(), ids)

    def _fill(self, cache: CompressedCache, ids: Tensor) -> CompressedCache:
        read_as_wanted(self._model, self._tokenizer, ids, cache)
        return cache
