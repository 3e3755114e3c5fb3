"""Reading a prompt once for several caches.

A policy selects after a layer's attention, which has then read the whole prompt. So the hidden
states do not depend on the selection, and one forward pass is enough: the arguments of each layer's
attention call are stored. For each cache, the stored calls run through the same wrapped attention
again, without the computations of the model between them. Only appending and selecting is left to
do.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.hybrid import HybridLayer
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.attend import Attended, AttentionCall
from snapkv.hf.attention import attend
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import cache_among, passed
from snapkv.hf.forward_context import Hook, hooked
from snapkv.policies import FullCache
from snapkv.prefill.decoder import replacing_forward


@dataclass(kw_only=True)
class _Step:
    """The tokens that one layer has appended to the cache, and the attention call that followed.

    Attributes:
        layer_idx: the index of the layer.
        keys: (B, Hkv, T, D) keys that were appended.
        values: (B, Hkv, T, Dv) values that were appended.
        returned_at: the address of the keys that the cache returned to the model.
        call: the attention call; None until it has run.
        last_output: (B, 1, Hq, Dv), its output for the last token; None until it has run.
    """

    layer_idx: int
    keys: Tensor
    values: Tensor
    returned_at: int
    call: AttentionCall | None = None
    last_output: Tensor | None = None

    def append_to(self, cache: CompressedCache) -> None:
        """Append the recorded tokens to another cache, as if the model had read the prompt into it.

        Changes `cache` in place. The attention call of this step must have been recorded.
        """
        assert self.call is not None
        assert self.last_output is not None
        tokens = self.call.query.shape[2]
        output = self.last_output.expand(-1, tokens, -1, -1)
        keys, values = cache.update(self.keys, self.values, self.layer_idx)
        call = dataclasses.replace(self.call, function=lambda *_, **__: (output, None))
        if self.call.key.data_ptr() == self.returned_at:
            call = dataclasses.replace(call, key=keys, value=values)
        attend(call)


class SharedReading:
    """A prompt that is read once, and whose reading can be repeated for any number of caches.

    For example::

        reading = SharedReading(model, ids)
        for policy in policies:
            with reading.given():
                model.generate(ids, past_key_values=CompressedCache(model, policy))

    It holds the keys, values and queries of all layers; see `shared_bytes`.

    Args:
        model: a decoder-only transformers model.
        input_ids: (B, T) int64, which must not contain padding; this is not checked.

    Attributes:
        read_ms: how long reading took, in milliseconds.

    Raises:
        UnsupportedModelError: some layers do not hold keys and values of their own, but recurrent
            states or the keys of another layer; the model's `forward` is already wrapped; or the
            model cannot be compressed.
    """

    def __init__(self, model: PreTrainedModel, input_ids: Tensor) -> None:
        self._model, self._ids = model, input_ids
        leader = _RecordingCache(model, FullCache())
        begin = time.perf_counter()
        unwrapped = replacing_forward({model: model.forward})  # raises now if `given` would raise
        with torch.inference_mode(), hooked(leader), unwrapped:
            output = model(input_ids, **passed(leader), logits_to_keep=1)
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.read_ms = (time.perf_counter() - begin) * 1000
        self._steps = leader.steps
        self._output = dataclasses.replace(output, **passed(None))
        indices = [
            step.layer_idx
            for step in self._steps
            if step.call is not None and not isinstance(leader.layers[step.layer_idx], HybridLayer)
        ]
        if indices != list(range(len(leader.layers))):
            got = f"{len(indices)} of {len(leader.layers)} in {type(model).__name__}"
            problem = f"every layer must store its own keys and values, but only {got} do"
            raise wrong("model", problem, "Read the prompt for each cache", UnsupportedModelError)

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Fill an empty cache from this reading when the model reads the same prompt in this block.

        This holds for a forward pass with the same ids into an empty `CompressedCache`, in which
        nothing is hidden and positions count from 0, and which requests only logits: no loss,
        hidden states, attention weights or tuple. Its output has the logits of the last token only.
        Every other forward pass runs as usual. The model is changed in place within the block.

        Raises:
            UnsupportedModelError: the model's `forward` is already wrapped.
        """
        own = self._model.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            cache: Any = cache_among(kwargs)
            ids = args[0] if args else kwargs.get("input_ids")
            is_empty = isinstance(cache, CompressedCache) and not cache.get_seq_length()
            is_read = isinstance(ids, Tensor) and torch.equal(ids, self._ids)
            if not (is_empty and is_read and _is_plain(kwargs)):
                return own(*args, **kwargs)
            for step in self._steps:
                step.append_to(cache)
            return dataclasses.replace(self._output, **passed(cache))

        with replacing_forward({self._model: forward}):
            yield


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Return whether a call requests only logits, hides no token, and counts positions from 0."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    wants_more = kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
    return not (
        wants_more
        or kwargs.get("labels") is not None
        or kwargs.get("return_dict") is False
        or (mask is not None and not bool(mask.all()))
        or (positions is not None and bool((positions.diff() != 1).any() or positions.min()))
    )


class _RecordingCache(CompressedCache, Hook):
    """A cache that keeps all tokens, and records the tokens and the attention call of each layer.

    Attributes:
        steps: one record for each layer, in the order in which the layers were read.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[_Step] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        step = _Step(
            layer_idx=layer_idx, keys=key_states, values=value_states, returned_at=keys.data_ptr()
        )
        self.steps.append(step)
        return keys, values

    def on_attention(self, call: AttentionCall, attended: Attended) -> None:
        """Record an attention call if it is the first one since a layer has appended its tokens."""
        if self.steps and self.steps[-1].call is None:
            step = self.steps[-1]
            step.call, step.last_output = call, attended[0][:, -1:].clone()


def shared_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Estimate how many bytes a `SharedReading` of one row of `tokens` tokens takes.

    It holds the queries, keys and values of all layers in the model's dtype.
    """
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = size * (heads + 2 * key_value_heads)
    return int(tokens * width * config.num_hidden_layers * model.dtype.itemsize)
