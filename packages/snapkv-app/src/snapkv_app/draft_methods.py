"""The methods that draft tokens for speculative decoding, behind one interface."""

from dataclasses import dataclass, field
from typing import Any

from snapkv.errors import wrong
from snapkv_app.models import LoadedModel


@dataclass(frozen=True, kw_only=True)
class DraftMethod:
    """A method that drafts tokens, which the model then verifies in one forward pass.

    Attributes:
        name: the name of the method.
        options: the keyword arguments of `model.generate` that enable it.
    """

    name: str
    options: dict[str, Any] = field(repr=False)

    def tally(self, new_tokens: int, passes: int) -> dict[str, Any]:
        """Return the name of the method, and how many tokens a forward pass gave on average.

        Every pass counts, including the one that reads the prompt, because transformers drafts
        tokens right after the prompt.

        Args:
            new_tokens: the number of generated tokens.
            passes: the number of forward passes; at least 1.

        Returns:
            "method", "passes", and "acceptance_length", which is tokens per pass.
        """
        share = new_tokens / passes
        return {"method": self.name, "passes": passes, "acceptance_length": share}


def prompt_lookup(tokens: int) -> DraftMethod:
    """Build the method that drafts by copying from the text so far.

    If the last tokens occur earlier in the text, it drafts the tokens that follow them there.

    Args:
        tokens: the number of tokens to draft for each pass.

    Raises:
        InvalidArgumentError: `tokens` is less than 1.
    """
    if tokens < 1:
        raise wrong(
            "prompt_lookup",
            f"expected at least 1 token to draft, but got {tokens}",
            "For example, use 10",
        )
    return DraftMethod(name="prompt-lookup", options={"prompt_lookup_num_tokens": tokens})


def assistant(loaded: LoadedModel, other: LoadedModel) -> DraftMethod:
    """Build the method that drafts with a smaller model, which is not checked to be smaller.

    If the models have different vocabularies, the drafts are exchanged as text.

    Args:
        loaded: the model that answers.
        other: the smaller model.
    """
    options: dict[str, Any] = {"assistant_model": other.model}
    if other.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        options |= {"tokenizer": loaded.tokenizer, "assistant_tokenizer": other.tokenizer}
    return DraftMethod(name="assistant", options=options)
