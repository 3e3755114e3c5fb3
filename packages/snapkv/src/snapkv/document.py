"""A document that is read once, and many questions that each vote on all of it."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.recall import pad_in_front
from snapkv.errors import InvalidTypeError, wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.hf.placement import device_of
from snapkv.policies import Policy
from snapkv.policies.base import ALL_QUERIES
from snapkv.storage.bits import Bits, KVCodes
from snapkv.storage.offload import Recall
from snapkv.validation import require_int


class Document:
    """A text that a model has read, and that is offloaded until a question is asked.

    ::

        document = Document(model, tokenizer(text, return_tensors="pt").input_ids, SnapKV(1024))
        questions = tokenizer(["... Who?", "... When?"], add_special_tokens=False).input_ids
        model.generate(**document.inputs(questions), max_new_tokens=64)

    Nothing is evicted before a question is known: all keys and values are offloaded, and every
    question votes on all of them with its own observation window. The kept tokens and the answers
    are the same as if document and question had been read together. The model reads only the
    question's tokens, and as many of the document's last tokens as the observation window or the
    padding of a batch reaches back. Questions of a batch share the offloaded document.

    With the default method all tokens of a question vote; if it has more than 1,024 tokens, only
    its last 16 do, or 18 with a small budget. In a batch every row has as many voters as the
    longest question needs.

    Args:
        model: a decoder-only transformers model.
        input_ids: (1, T) or (T,) integers, the document's tokens.
        policy: selects the tokens to keep for a question; `snapkv.default_policy()` by default. It
            must work with ``turns="recall"``.
        recall: where the document is offloaded to, as in `CompressedCache`: "host", or the path of
            a folder.
        recall_bytes: the largest number of bytes to offload; no limit by default.
        chunk_tokens: how many tokens to read in one forward pass; None for all.

    Raises:
        InvalidArgumentError: an empty document, a batch of several, an option out of range, or a
            policy that cannot be used with recall (one that evicts during decoding, reads twice, or
            needs earlier queries).
        InvalidTypeError: `input_ids` is not a tensor of integers, or an option has the wrong type.
        UnsupportedModelError: the model cannot be compressed correctly.
        OutOfMemoryError: the offloaded document exceeds `recall_bytes` or does not fit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        policy: Policy | None = None,
        *,
        recall: Recall = "host",
        recall_bytes: int | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        self.model = model
        self._cache = CompressedCache(model, policy, recall=recall, recall_bytes=recall_bytes)
        self.input_ids = _one_row(input_ids).to(device_of(model))
        tokens = self.input_ids.shape[1]
        if chunk_tokens is not None:
            chunk_tokens = require_int("chunk_tokens", chunk_tokens, minimum=1)
        self._cache.expect_prompt(tokens + 1)  # evict nothing before a question
        with torch.no_grad():
            for piece in torch.split(self.input_ids, chunk_tokens or tokens, dim=1):
                model(piece, **passed(self._cache), logits_to_keep=1)

    @property
    def tokens(self) -> int:
        """The number of tokens of the document, T."""
        return int(self.input_ids.shape[1])

    @property
    def host_bytes(self) -> int:
        """The size of the document's offloaded keys and values in bytes, in memory or in files."""
        return self._cache.report().host_bytes

    def inputs(self, questions: Sequence[Sequence[int] | Tensor]) -> dict[str, Any]:
        """Return the arguments of `model.generate` that answer a batch of questions.

        The document itself stays unchanged.

        Args:
            questions: the token ids of each question, without leading special tokens: everything
                between the document and the answer.

        Returns:
            A dictionary with `input_ids` and `attention_mask`, both (B, T + longest question)
            integers on the model's device and padded on the left, and with a new cache that has
            seen the document. Its key is `cache`, or `past_key_values` before transformers 5.24.
            The cache can be used for further turns. If padding and window reach back over the whole
            document, the cache is empty, and `generate` reads the document again.

        Raises:
            InvalidTypeError: a question is not a sequence of token ids, but for example a text.
            InvalidArgumentError: there is no question, or an empty one; `questions` is a flat list
                of token ids; or the questions have different lengths, and some layers of the model
                keep only the last tokens.
        """
        tensors = [_token_ids(question).to(self.input_ids.device) for question in questions]
        if not tensors or not all(question.ndim == 1 and len(question) for question in tensors):
            shapes = [tuple(question.shape) for question in tensors]
            problem = f"expected a list of token ids for each question, but got the shapes {shapes}"
            raise wrong("questions", problem, "For example, pass [tokenizer(text).input_ids]")
        longest = max(map(len, tensors))
        pads = longest - torch.tensor([len(question) for question in tensors])
        rows = [torch.cat([self.input_ids[0], question]) for question in tensors]
        ids = pad_sequence(rows, batch_first=True, padding_side="left")
        mask = torch.arange(ids.shape[1]) >= pads[:, None]
        cache = self._cache_for(pads, longest)
        cache.prompt_state.record_text(ids)
        return {
            "input_ids": ids,
            "attention_mask": mask.long().to(ids.device),
            **passed(cache),
        }

    def _cache_for(self, pads: Tensor, longest: int) -> CompressedCache:
        """Return a cache whose rows have seen the document after `pads` columns of padding.

        All rows have seen the same number of columns. So the model has to read the document's end
        again if there is padding, and as much of it as the window reaches back, because only
        queries that are read now can vote.

        Args:
            pads: (B,) int64 on the CPU, how many tokens shorter than the longest question each one
                is.
            longest: how many tokens the longest question has.

        Returns:
            A new cache, which shares the offloaded tokens with the document's. It is empty if the
            whole document has to be read again.

        Raises:
            InvalidArgumentError: there is padding, but some layers keep only the last tokens.
        """
        cache = copy.deepcopy(self._cache)
        cache.expect_question(longest)
        cache.prompt_state.prompt_end = None
        hybrid = cache.is_hybrid
        if hybrid and bool(pads.any()):
            name, apart = type(self.model).__name__, int(pads.max())
            layers = f"because some layers of {name} keep only the last tokens"
            problem = f"expected an equal length, {layers}, but the lengths differ by {apart}"
            raise wrong("questions", problem, "Ask the questions one at a time")
        window, seen = cache.prompt_state.policy.query_tokens, self.tokens
        if not hybrid and window != ALL_QUERIES:
            seen += longest - max(longest, window)
        if seen <= int(pads.max()):
            cache.reset()  # the document is too short to be recalled, so it is read again
            return cache
        for layer in cache.layers:
            layer.reorder_cache(torch.zeros(len(pads), dtype=torch.int64))
            if isinstance(layer, CompressedLayer):
                pad_in_front(layer, seen, pads, forget_queries=not hybrid)
        return cache

    def save(self, path: str | Path, *, bits: Bits | KVCodes | None = None) -> None:
        """Write the document with its keys and values to a file.

        Args:
            path: the file to write. A saved cache or document with this name is replaced.
            bits: the format in which the file stores keys and values: "int8", "int4", "K8V4", or a
                `KVCodes`; by default they are stored exactly.

        Raises:
            InvalidArgumentError: `bits` is not a known format, or a stored number is not finite.
            InvalidTypeError: `path` is not a path.
            CacheFileError: the file cannot be written, or another kind of file has that name.
            CacheMismatchError: the model has been deleted, or a forward pass was interrupted.
        """
        self._cache.save(path, beside={"input_ids": self.input_ids}, bits=bits)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, **options: Any) -> Self:
        """Load a document from a file that `save` has written.

        Args:
            path: the file.
            model: the model that has read the document, in the same dtype, on any device.
            options: `policy` if the document's policy is not one of this package; `recall` ("host"
                by default) and `recall_bytes`.

        Raises:
            CacheFileError: the file is missing or damaged, or was not written by `save`.
            CacheMismatchError: the document was read by another model, or in another dtype, or with
                another policy.
            InvalidArgumentError: the file holds a saved cache that is not a document, or an option
                is out of range.
            InvalidTypeError: `path` is not a path, or an option has the wrong type.
            OutOfMemoryError: the offloaded document exceeds `recall_bytes` or does not fit.
        """
        document = cls.__new__(cls)
        document.model = model
        document._cache, beside = CompressedCache.load_with(path, model, **options)
        if "input_ids" not in beside or document._cache.report().kept_tokens:
            problem = f"the file {str(path)!r} contains a saved cache and not a document"
            raise wrong("path", problem, "Use CompressedCache.load to load this file")
        document.input_ids = beside["input_ids"].to(device_of(model))
        return document


def _token_ids(question: Any) -> Tensor:
    """Convert the token ids of one question to a tensor, without checking its shape.

    Returns:
        A tensor of integers; `question` itself if it is one. An empty question of any type is
        accepted.

    Returns:
        (N,) integers. A nested list gives more axes, which `Document.inputs` refuses.

    Raises:
        InvalidTypeError: `question` holds something other than integers.
    """
    try:
        ids = torch.as_tensor(question)
    except (RuntimeError, TypeError, ValueError):  # a text, a token of None, uneven lists
        ids = None
    if ids is None or (ids.numel() and ids.is_floating_point()):
        problem = f"expected a list of token ids for each question, but got {question!r:.60}"
        raise wrong(
            "questions", problem, "For example, pass [tokenizer(text).input_ids]", InvalidTypeError
        )
    return ids


def _one_row(input_ids: Any) -> Tensor:
    """Return the token ids of a document as a tensor with one row, (1, T).

    Returns:
        `input_ids` itself, or a view of it if it has only one axis.

    Raises:
        InvalidTypeError: `input_ids` is not a tensor of integers.
        InvalidArgumentError: there is no token, or more than one row.
    """
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
        got = getattr(input_ids, "dtype", type(input_ids).__name__)
        problem = f"expected a tensor of integers, but got {got}"
        remedy = "For example, pass tokenizer(text, return_tensors='pt').input_ids"
        raise wrong("input_ids", problem, remedy, InvalidTypeError)
    row = input_ids[None] if input_ids.ndim == 1 else input_ids
    if row.ndim != 2 or row.shape[0] != 1 or not row.shape[1]:
        problem = f"expected one document, but got a tensor with the shape {tuple(input_ids.shape)}"
        raise wrong("input_ids", problem, "Make a separate Document for each text")
    return row
