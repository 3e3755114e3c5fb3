"""Reading documents into caches of their own, and loading those again."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import InvalidArgumentError, PromptTooLongError
from snapkv.hf import saved
from snapkv.hf.cache import CompressedCache
from snapkv.kvzip import read_twice
from snapkv.library.about import About
from snapkv.library.frame import document_ids
from snapkv.library.parts import Part
from snapkv.library.records import Record, Text
from snapkv.plan import free_bytes, max_positions, out_of_memory_explained, prompt_advice
from snapkv.policies import FullCache, Policy
from snapkv.policies.kvzip import INSTRUCTION


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A model that reads documents the way a library says.

    Attributes:
        model: the model. tokenizer: its tokenizer.
        about: how to read.
        policy: what to keep.
    """

    model: PreTrainedModel
    tokenizer: Any
    about: About
    policy: Policy

    def empty_cache(self, *, protect_prefix: bool = False) -> CompressedCache:
        """A cache for one document.

        Args:
            protect_prefix: whether all heads keep the prefix, so that without it, which stands once
                before several documents, they still hold as many tokens each.

        Raises:
            UnsupportedModelError: the model cannot be compressed correctly.
        """
        protect = [(0, len(self.about.prefix_ids))] if protect_prefix else None
        return CompressedCache(self.model, self.policy, protect=protect)

    def read(self, text: Text) -> Part:
        """Read a document behind the prefix; a policy that needs it gets a second reading.

        Raises:
            PromptTooLongError: it is longer than what the model has positions for.
            OutOfMemoryError: the device is full; the message says what would fit.
        """
        ids = self._ids(text)
        tokens = ids.shape[1]
        advice = functools.partial(prompt_advice, self.model, tokens, free_bytes(self.model.device))
        with out_of_memory_explained(advice):
            cache = self._filled(ids)
        return Part(input_ids=ids, cache=cache, prefix_tokens=len(self.about.prefix_ids))

    def save(self, part: Part, path: Path) -> None:
        """Write a document to a file, in the library's bits.

        Raises:
            CacheFileError: the file cannot be written.
        """
        cache, beside = part.cache, {"input_ids": part.input_ids}
        saved.write(cache, cache.options, path, beside, self.about.bits, self.about.model)

    def load(self, path: Path) -> Part:
        """A document out of its file.

        Raises:
            CacheFileError: no such file, or not as it was written.
        """
        own = self.policy if self.policy.needs else None
        cache, beside = saved.read(
            CompressedCache, path, self.model, own, identity=self.about.model
        )
        ids = beside["input_ids"].to(self.model.device)
        return Part(input_ids=ids, cache=cache, prefix_tokens=len(self.about.prefix_ids))

    def own_ids(self, text: Text | Record) -> list[int]:
        """The tokens of a document without the prefix."""
        return document_ids(self.tokenizer, text.name, text.text)

    def _ids(self, text: Text) -> Tensor:
        """(1, T) int64, the prefix and the document."""
        own = self.own_ids(text)
        positions, tokens = max_positions(self.model), len(self.about.prefix_ids) + len(own)
        if positions is not None and tokens >= positions:
            raise PromptTooLongError(
                f"document: expected fewer tokens than the model's {positions:,} positions, got "
                f"{tokens:,} in {text.name!r}; split it, or choose a model with more positions"
            )
        return torch.tensor([[*self.about.prefix_ids, *own]], device=self.model.device)

    def _filled(self, ids: Tensor) -> CompressedCache:
        """What has read the document; where the budget has room for the prefix, that stays."""
        if self.about.prefix_ids and not isinstance(self.policy, FullCache):
            try:
                return self._fill(self.empty_cache(protect_prefix=True), ids)
            except InvalidArgumentError:
                pass  # so short a document, or so small a budget; what else is wrong is said below
        return self._fill(self.empty_cache(), ids)

    @torch.no_grad()
    def _fill(self, cache: CompressedCache, ids: Tensor) -> CompressedCache:
        if self.policy.reads_twice:
            repeat = self.tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
            read_twice(self.model, ids, cache, instruction_ids=repeat)
            return cache
        cache.expect_tokens(ids)
        cache.expect_prompt(ids.shape[1])
        self.model(ids, past_key_values=cache, logits_to_keep=1)
        return cache
