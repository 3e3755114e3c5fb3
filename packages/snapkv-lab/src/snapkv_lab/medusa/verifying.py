"""What verifying drafts takes of `generate`, of a cache and of a model's linear layers."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache

from snapkv.errors import CacheMismatchError, InvalidArgumentError, UnsupportedModelError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed

MOST_ROWS = 5
"""Beyond so many rows torch's own float32 product is the faster one."""


@dataclass(kw_only=True)
class Tally:
    """What one text took.

    Attributes:
        new_tokens: generated, the first included.
        passes: forward passes of the model after the prompt that verified drafts.
        drafted: candidates that were verified.
        accepted: those of them that are in the text.
    """

    new_tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verifying pass: 1 where nothing is ever accepted, as in plain decoding."""
        return (self.new_tokens - 1) / self.passes if self.passes else 1.0


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What `generate` asks for."""

    model: PreTrainedModel
    cache: CompressedCache
    ids: Tensor  # (1, T) int64, the prompt
    samples: bool
    processors: LogitsProcessorList  # change the logits of a token, given the text before it
    limit: int  # most tokens of prompt and text together
    chunk_tokens: int | None  # read the prompt in pieces of so many; None for one pass

    def processed(self, text: Tensor, logits: Tensor) -> Tensor:
        """(V,) float32: the logits of the token after a text (N,), as `generate` changes them."""
        changed: Tensor = self.processors(text[None], logits[None].float())
        return changed[0]

    def choose(self, logits: Tensor) -> int:
        """The next token, of processed logits (V,)."""
        if self.samples:
            return int(torch.multinomial(logits.softmax(dim=-1), 1))
        return int(logits.argmax())

    def read_prompt(self) -> Tensor:
        """Read what the cache has not seen of the prompt; (V,) logits after its last token."""
        seen = self.cache.get_seq_length()
        if seen >= self.ids.shape[1]:
            raise CacheMismatchError(
                f"input_ids: expected the whole text where drafts are verified, longer than the "
                f"{seen:,} tokens the cache has seen, got {self.ids.shape[1]:,}; pass all of it"
            )
        unread = self.ids[:, seen:]
        for piece in torch.split(unread, self.chunk_tokens or unread.shape[1], dim=1):
            output = self.model(piece, **passed(self.cache), use_cache=True, logits_to_keep=1)
        logits: Tensor = output.logits[0, -1]
        return logits


def cut_at_stop(text: Tensor, tokens: list[int], stopping_criteria: Any) -> tuple[Tensor, bool]:
    """The tokens up to the first that ends the text, and whether one does."""
    added = torch.tensor(tokens, device=text.device)
    for count in range(1, len(tokens) + 1):
        if bool(stopping_criteria(torch.cat([text, added[:count]])[None], None).all()):
            return added[:count], True
    return added, False


def require_one_sequence(ids: Tensor, mask: Tensor | None, config: GenerationConfig) -> None:
    padded = mask is not None and not bool(mask.all())
    for is_refused, refusal in (
        (
            ids.shape[0] != 1 or (config.num_beams or 1) > 1,
            f"input_ids: expected one sequence without beams where drafts are verified, got "
            f"{ids.shape[0]} with num_beams={config.num_beams}; generate them one by one",
        ),
        (
            not ids.shape[1],
            "input_ids: expected the prompt as token ids, got none; pass input_ids, not embeddings",
        ),
        (
            padded,
            "attention_mask: expected no padding where drafts are verified, got a masked position; "
            "pass the one sequence without pads",
        ),
        (
            config.return_dict_in_generate,
            "return_dict_in_generate: expected False where drafts are verified, got True; leave it "
            "out",
        ),
    ):
        if is_refused:
            raise InvalidArgumentError(refusal)


def begin_verifying(cache: Cache) -> None:
    """From now on every forward pass holds drafts, some of which are forgotten after it."""
    stuck = sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable})
    if stuck:
        raise UnsupportedModelError(
            f"model: expected layers that can forget rejected drafts, got {', '.join(stuck)}; "
            "generate without drafts"
        )
    cache.activate_past_recording()


@contextlib.contextmanager
def fast_few_rows(model: Module) -> Iterator[None]:
    """Within this block the model's linear layers read few rows at about the price of one, on CPUs.

    For two to five rows torch's float32 kernel takes about twice as long as for one, which is what
    drafts are meant to save; the same product turned around, weights first, does not.
    """
    slow = [
        module
        for module in model.modules()
        if type(module) is Linear and _is_slow(module.weight) and "forward" not in vars(module)
    ]
    for module in slow:
        vars(module)["forward"] = functools.partial(_forward, module)
    try:
        yield
    finally:
        for module in slow:
            vars(module).pop("forward", None)


def _is_slow(weight: Tensor) -> bool:
    plain = type(weight) is Parameter and type(weight.data) is Tensor
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32


def _forward(module: Linear, states: Tensor) -> Tensor:
    """(..., N): states (..., K) through a weight (N, K), as `Linear.forward` does."""
    rows = states.numel() // module.in_features
    usual = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    if usual or not 1 < rows <= MOST_ROWS or states.dtype != module.weight.dtype:
        return Linear.forward(module, states)
    product = torch.mm(module.weight, states.reshape(rows, -1).T).T
    if module.bias is not None:
        product = product + module.bias
    return product.contiguous().view(*states.shape[:-1], module.out_features)
