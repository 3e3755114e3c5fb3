"""Find the tokens of a prompt that are always kept: texts, its beginning and a system message."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from snapkv.cache.spans import layer_of_sizes
from snapkv.errors import InvalidArgumentError, wrong
from snapkv.ops import TokenCost
from snapkv.policies import FullCache, Policy
from snapkv.policies.budget import ByteBudget, budget_of
from snapkv.policies.spans import Span, Spans
from snapkv.validation import require_int
from snapkv_app.prompts import Prompt

Costs = Callable[[], Sequence[TokenCost]]
"""Returns the bytes of a token in every compressed layer; empty if they are unknown."""


@dataclass(frozen=True, kw_only=True)
class Protection:
    """The tokens of a prompt that every layer and head keeps, see `CompressedCache`.

    Raises:
        InvalidArgumentError: a text is empty, or `first_tokens` is negative.
        InvalidTypeError: `first_tokens` is not an integer.
    """

    texts: Sequence[str] = ()  # every occurrence of each of them, also in the chat template
    first_tokens: int = 0
    system: bool | None = False  # the system message of a chat; None keeps it if it fits

    def __post_init__(self) -> None:
        require_int("protect_first", self.first_tokens, minimum=0)
        if not all(text.strip() for text in self.texts):
            raise wrong(
                "protect",
                "expected a text that occurs in the prompt, but got an empty text",
                "Copy a part of the text from the prompt",
            )

    def spans(
        self, prompt: Prompt, policy: Policy, tokenizer: Any, costs: Costs = list
    ) -> list[Span]:
        """Return the spans of tokens to protect, for `CompressedCache`.

        If `system` is None and the system message cannot be protected, a warning is written to
        standard error.

        Args:
            prompt: the prompt.
            policy: selects the tokens to keep.
            tokenizer: the tokenizer of the model.
            costs: returns the bytes of a token in the compressed layers. It is only called if the
                budget is a number of bytes.

        Returns:
            The spans in no particular order; they may overlap. Empty if nothing is protected.

        Raises:
            InvalidArgumentError: the prompt does not contain a text, the tokenizer reports no
                offsets, or `system` is True and its message is missing or does not fit into the
                budget.
        """
        found = [(0, self.first_tokens)] if self.first_tokens else []
        for text in self.texts:
            found += _occurrences(prompt, text, tokenizer)
        return found + self._system(prompt, policy, tokenizer, found, costs)

    def _system(
        self, prompt: Prompt, policy: Policy, tokenizer: Any, others: list[Span], costs: Costs
    ) -> list[Span]:
        """Return a list with the span of the system message; empty if it is not protected.

        It is not protected by a policy that keeps all tokens, and neither if the other spans alone
        do not fit into the budget, which the cache refuses later. If `system` is None and it cannot
        be kept, a warning is written to standard error.

        Args:
            prompt: the prompt.
            policy: selects the tokens to keep.
            tokenizer: the tokenizer of the model.
            others: the other protected spans, which the budget must hold, too.
            costs: as for `spans`.

        Raises:
            InvalidArgumentError: `system` is True, and there is no system message or it cannot be
                kept.
        """
        if self.system is False or isinstance(policy, FullCache):
            return []
        if not prompt.system_characters:
            if self.system:
                raise wrong(
                    "protect_system",
                    "the prompt does not contain a system message",
                    "Remove this option",
                )
            return []
        try:
            offsets = _offsets(prompt, tokenizer)
            system = tokens_of(offsets, 0, prompt.system_characters)
            known = costs() if isinstance(budget_of(policy), ByteBudget) else []
            if not _fits(policy, others, len(offsets), known):
                return []
            _require_fit(policy, [*others, *system], len(offsets), known)
        except InvalidArgumentError as error:
            if self.system:
                raise
            reason = str(error).partition(": ")[2]
            sys.stderr.write(f"snapkv: warning: the system message is not protected: {reason}\n")
            return []
        return system


def _occurrences(prompt: Prompt, text: str, tokenizer: Any) -> list[Span]:
    """Return the tokens of every occurrence of a text in a prompt.

    Raises:
        InvalidArgumentError: the prompt does not contain the text, or the tokenizer reports no
            offsets.
    """
    offsets = _offsets(prompt, tokenizer)
    found = [
        span
        for match in re.finditer(re.escape(text), prompt.text)
        for span in tokens_of(offsets, *match.span())
    ]
    if not found:
        raise wrong(
            "protect",
            f"the prompt does not contain the text {text[:60]!r}",
            "Copy the text from the prompt",
        )
    return found


def tokens_of(offsets: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return the span of the tokens that overlap a range of characters.

    Args:
        offsets: the first character of every token, and the first character after it.
        start: the first character of the range.
        stop: the first character after the range.

    Returns:
        A list of one span; an empty list if no token overlaps the range.
    """
    within = [
        position
        for position, (begin, end) in enumerate(offsets)
        if begin < stop and end > start and end > begin
    ]
    return [(within[0], within[-1] + 1)] if within else []


def _offsets(prompt: Prompt, tokenizer: Any) -> list[Span]:
    return prompt.offsets(tokenizer, "protect", "Use the option --protect-first instead")


def _fits(policy: Policy, spans: list[Span], tokens: int, costs: Sequence[TokenCost]) -> bool:
    """Return whether the policy can keep `spans`; the arguments are those of `_require_fit`."""
    try:
        _require_fit(policy, spans, tokens, costs)
    except InvalidArgumentError:
        return False
    return True


def _require_fit(
    policy: Policy, spans: list[Span], tokens: int, costs: Sequence[TokenCost]
) -> None:
    """Raise unless the policy can keep `spans` in a prompt of `tokens` tokens.

    Args:
        policy: selects the tokens to keep.
        spans: the protected tokens; may be empty.
        tokens: the number of tokens of the prompt.
        costs: the bytes of a token in every compressed layer; only needed for a budget in bytes,
            and else empty.

    Raises:
        InvalidArgumentError: the spans do not fit into the budget, or the policy cannot protect
            tokens.
    """
    protected = Spans.of("protect", spans)
    if protected.parts:
        policy.require_protection(protected)
    first, *_ = costs or [TokenCost(full_bytes=1, block_bytes=1)]  # right for a share, unquantized
    layers, positions = max(2, len(costs)), torch.arange(tokens)
    policy.require_fit(layer_of_sizes(positions, protected, layers, token_cost=lambda: first))
