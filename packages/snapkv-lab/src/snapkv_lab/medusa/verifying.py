"""The parts of `generate`, of a cache and of linear layers that the verification of drafts
needs.
"""

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

from snapkv.errors import CacheMismatchError, UnsupportedModelError, wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed

MOST_ROWS = 5
"""The most rows for which the product here is faster than torch's own float32 product."""


@dataclass(kw_only=True)
class Tally:
    """The number of tokens that were generated, drafted and accepted in a text.

    Attributes:
        new_tokens: how many tokens were generated, the first included.
        passes: how many forward passes verified drafts.
        drafted: how many candidates were verified.
        accepted: how many of them are in the text.
    """

    new_tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """The average number of tokens that are generated in each verifying forward pass.

        It is 1 if nothing is accepted, as in plain decoding, or if there was no such pass.
        """
        return (self.new_tokens - 1) / self.passes if self.passes else 1.0


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """The arguments of a call to `generate`."""

    model: PreTrainedModel
    cache: CompressedCache
    ids: Tensor  # (1, T) int64, the prompt
    samples: bool
    processors: LogitsProcessorList  # they change the logits of a token, given the text before it
    limit: int  # the most tokens of prompt and text together
    chunk_tokens: int | None  # the prompt is read in pieces of this size; None for one pass

    def processed(self, text: Tensor, logits: Tensor) -> Tensor:
        """Return the logits after they have been changed by the logits processors.

        Args:
            text: (tokens,) int64, the text before the token.
            logits: (V,), the logits after the text, for the V tokens of the vocabulary.

        Returns:
            (V,) float32.
        """
        changed: Tensor = self.processors(text[None], logits[None].float())
        return changed[0]

    def choose(self, logits: Tensor) -> int:
        """Return the id of the next token: a random one with the probabilities of the logits if
        `samples`, or else the most likely one.

        Args:
            logits: (V,), changed by the processors.
        """
        if self.samples:
            return int(torch.multinomial(logits.softmax(dim=-1), 1))
        return int(logits.argmax())

    def read_prompt(self) -> Tensor:
        """Read the tokens of the prompt that the cache has not seen into the cache, and return the
        logits after the last one.

        Returns:
            (V,), for the V tokens of the vocabulary.

        Raises:
            CacheMismatchError: the cache has seen at least as many tokens as the prompt has.
        """
        seen = self.cache.get_seq_length()
        if seen >= self.ids.shape[1]:
            raise wrong(
                "input_ids",
                f"expected the whole text, longer than the {seen:,} tokens that the cache has "
                f"seen, but got {self.ids.shape[1]:,}",
                "Pass all of it",
                CacheMismatchError,
            )
        unread = self.ids[:, seen:]
        for piece in torch.split(unread, self.chunk_tokens or unread.shape[1], dim=1):
            output = self.model(piece, **passed(self.cache), use_cache=True, logits_to_keep=1)
        logits: Tensor = output.logits[0, -1]
        return logits


def cut_at_stop(text: Tensor, tokens: list[int], stopping_criteria: Any) -> tuple[Tensor, bool]:
    """Return the tokens up to the first that ends the text, and whether one ends it.

    Args:
        text: (N,) int64, the text before the tokens.
        tokens: the new tokens.
        stopping_criteria: the criteria of `generate`, which are asked after every token.

    Returns:
        (M,) int64, including the token that ends the text, and True if there is one.
    """
    added = torch.tensor(tokens, device=text.device)
    for count in range(1, len(tokens) + 1):
        if bool(stopping_criteria(torch.cat([text, added[:count]])[None], None).all()):
            return added[:count], True
    return added, False


def require_one_sequence(ids: Tensor, mask: Tensor | None, config: GenerationConfig) -> None:
    """Check that a single sequence is generated, without beams and without padding.

    Args:
        ids: (B, T) int64, the prompt.
        mask: the attention mask of the prompt; None if there is none.
        config: the settings of `generate`.

    Raises:
        InvalidArgumentError: there are several sequences, beams, padding or no token ids, or the
            output of `return_dict_in_generate` is wanted.
    """
    if ids.shape[0] != 1 or (config.num_beams or 1) > 1:
        problem = f"expected one sequence, but got {ids.shape[0]} with num_beams={config.num_beams}"
        raise wrong("input_ids", problem, "Generate the sequences one at a time, without beams")
    if not ids.shape[1]:
        problem = "the prompt must be given as token ids, but got none"
        raise wrong("input_ids", problem, "Pass input_ids instead of embeddings")
    if mask is not None and not bool(mask.all()):
        raise wrong(
            "attention_mask", "expected no padding, but got some", "Pass the row without padding"
        )
    if config.return_dict_in_generate:
        raise wrong(
            "return_dict_in_generate",
            "this option is not supported, but got True",
            "Remove this option",
        )


def begin_verifying(cache: Cache) -> None:
    """Prepare the cache so that its newest tokens, which are drafts, can be removed from it again.

    Raises:
        UnsupportedModelError: a layer cannot remove tokens. The cache is then unchanged.
    """
    stuck = sorted({type(layer).__name__ for layer in cache.layers if not layer.is_croppable})
    if stuck:
        problem = f"rejected drafts cannot be removed from layers of the type {', '.join(stuck)}"
        raise wrong("model", problem, "Generate without drafts", UnsupportedModelError)
    cache.activate_past_recording()


@contextlib.contextmanager
def fast_few_rows(model: Module) -> Iterator[None]:
    """Make the linear layers of the model faster for a small number of rows within this block.

    This replaces their `forward` until the block ends. It has an effect on two to five rows in
    float32 on a CPU without gradients, whose results may differ in their last bits. For so few rows
    torch's float32 product takes about twice as long as for one row, which cancels the gain of
    drafts. The transposed product, with the weights first, does not.
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
    """Compute the output of a linear layer, with the weights first for two to five rows.

    For other numbers of rows, with gradients, in autocast and in other dtypes than that of the
    weight, this is the usual product.

    Args:
        module: the layer, with a weight (N, K).
        states: (..., K).

    Returns:
        (..., N).
    """
    rows = states.numel() // module.in_features
    usual = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    if usual or not 1 < rows <= MOST_ROWS or states.dtype != module.weight.dtype:
        return Linear.forward(module, states)
    product = torch.mm(module.weight, states.reshape(rows, -1).T).T
    if module.bias is not None:
        product = product + module.bias
    return product.contiguous().view(*states.shape[:-1], module.out_features)
