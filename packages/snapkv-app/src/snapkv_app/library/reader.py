"""Read documents into separate caches, save the caches, and load them again."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import CacheFileError, InvalidArgumentError, PromptTooLongError, wrong
from snapkv.hf import saved
from snapkv.hf.cache import CompressedCache
from snapkv.hf.model_parts import max_positions
from snapkv.hf.placement import device_of
from snapkv.kvzip import read_for_policy
from snapkv.policies import FullCache
from snapkv_app.control_words import control_tokens
from snapkv_app.library.about import About, document_ids
from snapkv_app.library.joining import Part
from snapkv_app.library.records import Text
from snapkv_app.plan.advice import prompt_memory_explained


class Reader:
    """A model that reads documents in the way that a library's `About` describes.

    Args:
        model: the model that reads documents.
        tokenizer: its tokenizer.
        about: the description. The caller must have checked that it describes this model and this
            tokenizer, see `About.require_same`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, about: About) -> None:
        self.about = about
        self._model, self._tokenizer = model, tokenizer
        self._policy = about.made_policy(tokenizer)

    def empty_cache(self, *, protect_prefix: bool = False) -> CompressedCache:
        """Create a cache for one document.

        Args:
            protect_prefix: whether all heads keep the prefix. Then they still store equally many
                tokens after the prefix is removed to join documents.

        Raises:
            UnsupportedModelError: the model cannot be compressed correctly.
            InvalidArgumentError: the policy cannot protect the prefix.
        """
        protect = [(0, len(self.about.prefix_ids))] if protect_prefix else None
        return CompressedCache(self._model, self._policy, protect=protect)

    def read(self, text: Text) -> Part:
        """Read a document after the prefix into a new cache, which keeps what the policy selects.

        With `KVzip`, and `AdaKV` around it, the model reads the document twice.

        Raises:
            InvalidArgumentError: the policy cannot compress this document, or the tokenizer turns
                ordinary words of it into control tokens.
            PromptTooLongError: the document has too many tokens for the model.
            UnsupportedModelError: the model's cache cannot be compressed.
            OutOfMemoryError: the device is full.
        """
        ids = self._ids(text)
        with prompt_memory_explained(self._model, ids.shape[1]):
            cache = self._read_ids(ids)
        return Part(input_ids=ids, cache=cache, prefix_tokens=len(self.about.prefix_ids))

    def save(self, part: Part, path: Path) -> None:
        """Write the cache and the tokens of a document to a file, in the bits of the library.

        Raises:
            CacheFileError: the file cannot be written.
        """
        cache, beside = part.cache, {"input_ids": part.input_ids}
        codes, identity = self.about.codes, self.about.model
        saved.write(cache, cache.options, path, beside, codes, identity, sweep=False)

    def load(self, path: Path) -> Part:
        """Load the cache of a document from its file to the device of the model.

        Raises:
            CacheFileError: the file is missing or damaged, or the tokens of the document contain
                control tokens, as versions before 0.3.0 have written them.
            CacheMismatchError: another model has written the file.
        """
        own = self._policy if self._policy.needs else None
        cache, beside = saved.read(
            CompressedCache, path, self._model, own, identity=self.about.model
        )
        ids = beside["input_ids"].to(device_of(self._model))
        read = ids[0, len(self.about.prefix_ids) :].tolist()
        if control_tokens(self._tokenizer, read):
            raise wrong(
                "path",
                f"the document in {path} contains control tokens, so it was not read as text",
                "Read the document again",
                CacheFileError,
            )
        return Part(input_ids=ids, cache=cache, prefix_tokens=len(self.about.prefix_ids))

    def own_ids(self, text: Text) -> list[int]:
        """Return the tokens of a document without the prefix; they begin with its name.

        Raises:
            InvalidArgumentError: the tokenizer turns ordinary words into control tokens.
        """
        return document_ids(self._tokenizer, text.name, text.text)

    def _ids(self, text: Text) -> Tensor:
        """Return the tokens of the prefix and the document, (1, T) int64, on the model's device.

        Raises:
            PromptTooLongError: the model has too few positions for them.
            InvalidArgumentError: the tokenizer turns ordinary words into control tokens.
        """
        own = self.own_ids(text)
        positions, tokens = max_positions(self._model), len(self.about.prefix_ids) + len(own)
        if positions is not None and tokens >= positions:
            raise wrong(
                "document",
                f"{text.name!r} and the prefix have {tokens:,} tokens, but they must have fewer "
                f"tokens than the {positions:,} positions of the model",
                "Split the document, use snapkv ask --passages 4k to read only the best passages, "
                "or choose a model with more positions",
                PromptTooLongError,
            )
        return torch.tensor([[*self.about.prefix_ids, *own]], device=device_of(self._model))

    def _read_ids(self, ids: Tensor) -> CompressedCache:
        """Read tokens into a new cache, which keeps the complete prefix if the budget allows it.

        Otherwise the policy may evict tokens of the prefix, too.

        Raises:
            InvalidArgumentError: the policy cannot compress this document.
            UnsupportedModelError: the model's cache cannot be compressed.
        """
        if self.about.prefix_ids and not isinstance(self._policy, FullCache):
            try:
                return self._read_into(self.empty_cache(protect_prefix=True), ids)
            except InvalidArgumentError:
                pass  # the prefix does not fit the budget; other errors are raised again below
        return self._read_into(self.empty_cache(), ids)

    def _read_into(self, cache: CompressedCache, ids: Tensor) -> CompressedCache:
        """Read tokens into `cache`, which is changed in place and returned."""
        read_for_policy(self._model, self._tokenizer, ids, cache)
        return cache
