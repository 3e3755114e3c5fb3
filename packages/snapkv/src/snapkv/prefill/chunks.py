"""Reading a prompt in pieces while every layer holds no more of it than a cap.

After every piece each layer keeps at most `cap_tokens`. Where a policy lets a window vote, the
prompt's last tokens are read behind every piece, at their true positions, vote on what is held and
on the piece, and are forgotten. What was dropped is gone; at the end the policy chooses its budget
from what is held. So neither memory nor time per token depends on the prompt's length. This is not
exact once something is dropped. In models with layers that keep the last tokens only, nothing can
be forgotten without a trace: there the last queries of the piece itself vote.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import InvalidArgumentError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import cache_among
from snapkv.plan import chunked_advice
from snapkv.policies.base import ALL_QUERIES
from snapkv.prefill.decoder import MemoryWatch, standing_in
from snapkv.validation import require_int

_PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids")


@contextlib.contextmanager
def chunked(model: PreTrainedModel, *, cap_tokens: int, chunk_tokens: int = 4096) -> Iterator[None]:
    """Within this block a `CompressedCache` never holds more than a cap of the prompt.

        with chunked(model, cap_tokens=16384):
            model.generate(ids, past_key_values=CompressedCache(model, SnapKV(1024)))

    Between two pieces every layer stores at most `cap_tokens`; while a piece is read, the window
    that votes besides, and the layer that reads, the piece. A prompt no longer than the cap is read
    exactly; of a longer one only the logits of the last piece are returned.

    Args:
        model: a decoder-only transformers model.
        cap_tokens: the most that each head of a layer holds between pieces; at least the budget.
        chunk_tokens: tokens of a piece.

    Raises:
        InvalidArgumentError: from within the block, a cap below the budget, a policy that cannot
            hold to one, or a padded prompt.
        UnsupportedModelError: the model's forward is wrapped already.
        OutOfMemoryError: from within the block; the message says what would fit. The cache has been
            emptied, the model is as it was.
    """
    require_int("cap_tokens", cap_tokens, minimum=1)
    require_int("chunk_tokens", chunk_tokens, minimum=1)
    forward, watch = model.forward, MemoryWatch(model)

    @functools.wraps(forward)  # generate looks at its parameters
    def read(*args: Any, **kwargs: Any) -> Any:
        cache = cache_among(kwargs)
        if not isinstance(cache, CompressedCache) or not cache.reading.is_open:
            return forward(*args, **kwargs)
        kwargs = _named(args, kwargs)
        tokens = _require_plain_prompt(kwargs, cache)
        watch.note(cache, tokens)
        with cache.reading.held_to(cap_tokens, tokens):
            return _read(forward, kwargs, tokens, chunk_tokens, cache)

    def advice() -> str:
        return chunked_advice(model, chunk_tokens, cap_tokens, watch.available_bytes)

    with standing_in({model: read}), watch.telling(advice):
        yield


def _read(
    forward: Callable[..., Any],
    kwargs: dict[str, Any],
    tokens: int,
    chunk_tokens: int,
    cache: CompressedCache,
) -> Any:
    """The model's output for the last piece, all of them read."""
    earlier = dict(kwargs)
    if "logits_to_keep" in inspect.signature(forward).parameters:
        earlier["logits_to_keep"] = 1  # nobody sees them
    seen, window = cache.get_seq_length(), _voting_tokens(cache)
    prompt_end = cache.reading.end_by(seen + tokens) - seen  # drafts may stand behind it
    cache.require_pieces(seen + prompt_end, chunk_tokens, kwargs.get("attention_mask"))
    every = torch.arange(tokens, device=_prompt(kwargs).device)
    last = every[:prompt_end][-window:]
    ends = _ends(min(tokens, prompt_end), chunk_tokens, cache.policy.query_tokens)
    for start, stop in itertools.pairwise([0, *ends, tokens]):
        given = kwargs if stop == tokens else earlier
        if window and stop < tokens and cache.reading.is_over_cap(stop - start):
            places = torch.cat([every[start:stop], last])
            with cache.reading.looking_ahead(window):
                forward(**_parts({"position_ids": None, **given}, places, seen))
        else:
            output = forward(**_parts(given, every[start:stop], seen))
    return output


def _ends(prompt_tokens: int, chunk_tokens: int, query_tokens: int) -> range:
    """Where pieces end but for the last one, which has more than the tokens that vote."""
    least = 1 if query_tokens == ALL_QUERIES else query_tokens + 1
    return range(chunk_tokens, prompt_tokens - least + 1, chunk_tokens)


def _voting_tokens(cache: CompressedCache) -> int:
    """How many of the prompt's last tokens vote on every piece; 0 where they cannot."""
    wanted = cache.policy.query_tokens
    hybrid = cache.is_hybrid
    return 0 if hybrid or wanted == ALL_QUERIES else wanted


def _parts(given: dict[str, Any], places: Tensor, seen: int) -> dict[str, Any]:
    """The arguments for tokens at some places of what is read, behind what was seen."""
    parts = dict(given)
    for name, value in given.items():
        if name == "position_ids" and value is None:
            parts[name] = seen + places[None]
        elif name == "attention_mask" and value is not None:
            parts[name] = value[:, : seen + int(places[0]) + len(places)]
        elif name in _PER_TOKEN and value is not None and value.shape[1] > 1:
            parts[name] = value[:, places.to(value.device)]
    return parts


def _prompt(kwargs: dict[str, Any]) -> Any:
    """Ids or embeddings, whichever was given."""
    ids = kwargs.get("input_ids")
    return kwargs.get("inputs_embeds") if ids is None else ids


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; ids may come first without one."""
    if len(args) > 1:
        raise InvalidArgumentError(
            f"model: expected at most the ids without a name where a prompt is read in pieces, got "
            f"{len(args)} arguments; name the others"
        )
    return kwargs | ({"input_ids": args[0]} if args else {})


def _require_plain_prompt(kwargs: dict[str, Any], cache: CompressedCache) -> int:
    """How many tokens are to be read; refuses pads, and arguments that may not split by token."""
    prompt = _prompt(kwargs)
    if prompt is None:
        raise InvalidArgumentError(
            "input_ids: expected the prompt's ids or inputs_embeds, got neither; pass one of them"
        )
    mask = kwargs.get("attention_mask")
    seen, tokens = cache.get_seq_length(), int(prompt.shape[1])
    plain = mask is None or (isinstance(mask, Tensor) and mask.shape[1:] == (seen + tokens,))
    if not plain or (mask is not None and not bool(mask.all())):
        raise InvalidArgumentError(
            "attention_mask: expected rows without padding where a prompt is read in pieces, got a "
            "mask that hides something; read rows of different length one by one, or use "
            "snapkv.prefill.layer_by_layer"
        )
    others = {name for name, value in kwargs.items() if isinstance(value, Tensor)}
    if odd := sorted(others - {*_PER_TOKEN, "attention_mask"}):
        raise InvalidArgumentError(
            f"{odd[0]}: expected nothing but ids, positions and a mask where a prompt is read in "
            "pieces, got a tensor; leave it out"
        )
    return tokens
