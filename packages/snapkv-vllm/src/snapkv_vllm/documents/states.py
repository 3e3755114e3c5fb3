"""Keys and values of whole documents, from files into one worker's cache."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError, SnapKVError
from snapkv.library.stored import StoredDocument, read_document
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.heads import HeadPlaces, HeadsAttention
from snapkv_vllm.layers import LayerRun
from snapkv_vllm.layouts import padded, slots


class DocumentStates:
    """Writes documents into blocks that nobody reads yet."""

    def __init__(
        self,
        runs: Sequence[LayerRun],
        block_tokens: Mapping[int, int],
        *,
        device: torch.device,
        heads: HeadsAttention | None,
    ) -> None:
        self._runs, self._block_tokens, self._device = runs, block_tokens, device
        self._heads = heads

    @torch.inference_mode()
    def fill(
        self,
        path: str,
        blocks: Sequence[Sequence[int]],
        model: Mapping[str, Any],
        *,
        seal: str,
        most_bytes: int,
        vocabulary: int,
    ) -> str:
        """Write the document in a file, which was looked at before, into the blocks of every group.

        `vocabulary` is how many tokens the model knows; see `read_document` for the rest.

        Returns:
            "", or why it is refused, by which the front end tells that from a worker that is lost.
        """
        try:
            document = read_document(path, model=model, seal=seal, most_bytes=most_bytes)
            highest = int(document.token_ids.max())
            if highest >= vocabulary:
                raise InvalidArgumentError(
                    f"document: expected token ids below {vocabulary:,}, the model's vocabulary, "
                    f"got {highest:,}; save it with the model that is served"
                )
            self._write(blocks, document)
        except SnapKVError as error:
            return str(error)
        return ""

    def _write(self, blocks: Sequence[Sequence[int]], document: StoredDocument) -> None:
        names = self._in_order()
        if len(document.keys) != len(names):
            raise InvalidArgumentError(
                f"document: expected the {len(names)} layers of the model, got "
                f"{len(document.keys)}; save it with the model that is served"
            )
        states = zip(document.keys, document.values, strict=True)
        of_layer = dict(zip(names, states, strict=True))
        kept = dict(zip(names, document.head_tokens.to(self._device), strict=True))
        per_head_budget = bool((document.head_tokens != document.head_tokens[0, 0]).any())
        groups = dict(zip(self._block_tokens, blocks, strict=True))
        for run in self._runs:
            tokens = len(groups[run.group]) * self._block_tokens[run.group]
            for name in run.layers:
                self._require_fitting(run, of_layer[name], kept[name], tokens, per_head_budget)
        for run in self._runs:
            of_group, size = groups[run.group], self._block_tokens[run.group]
            targets, whole = torch.tensor(of_group, device=self._device), len(of_group) * size
            for part, name in enumerate(run.layers):
                laid = partial(padded, tokens=whole)
                if per_head_budget:
                    laid = partial(HeadPlaces(kept[name], size, True).spread, slots=whole)
                laid_out = (laid(one.to(self._device))[None] for one in of_layer[name])
                layer = run.layout.part(slice(part, part + 1))
                layer.write(slots(targets, whole, size), *laid_out)
        if per_head_budget:
            assert self._heads is not None
            self._heads.keep_document(blocks[0][0], kept, len(document.token_ids))

    def _require_fitting(
        self,
        run: LayerRun,
        states: tuple[Tensor, Tensor],
        kept: Tensor,
        tokens: int,
        per_head_budget: bool,
    ) -> None:
        """Refuse what is no layer's, or takes other blocks than those of so many tokens."""
        cache, head_size = run.first.cache, run.first.wrapped.head_size
        size = self._block_tokens[run.group]
        shape = cache.shape[1], int(kept.max()), head_size
        is_whole = cache.shape[3] == 2 * head_size
        for one in states:
            if tuple(one.shape) != shape or one.dtype != cache.dtype or not is_whole:
                raise InvalidArgumentError(
                    f"document: expected keys and values of {shape} in {cache.dtype} in every "
                    f"layer, got {tuple(one.shape)} in {one.dtype}; save it with the model that is "
                    "served, in its dtype"
                )
        if per_head_budget and cache.shape[2] != size:
            raise InvalidArgumentError(
                f"document: expected blocks of {cache.shape[2]} tokens where heads keep different "
                f"numbers of them, got {size}; start the server with --block-size {cache.shape[2]}"
            )
        held = CachedPrefix.laid_out((), [kept.tolist()], size).kept_tokens
        if held > tokens:
            raise InvalidArgumentError(
                f"document: expected at most the {tokens:,} tokens that blocks were taken for, got "
                f"{held:,}; register it again"
            )

    def _in_order(self) -> list[str]:
        """Names of all layers, as the model has them one after the other."""
        from vllm.model_executor.models.utils import extract_layer_index

        names = [name for run in self._runs for name in run.layers]
        return sorted(names, key=extract_layer_index)
