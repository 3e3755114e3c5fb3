"""The drafting methods, behind one interface."""

from dataclasses import dataclass, field
from typing import Any

from snapkv.errors import wrong
from snapkv_app.models import LoadedModel


@dataclass(frozen=True, kw_only=True)
class DraftMethod:
    """The source of drafts, as keyword arguments of `model.generate`."""

    name: str
    options: dict[str, Any] = field(repr=False)

    def tally(self, new_tokens: int, passes: int) -> dict[str, Any]:
        """Return what the last text cost: its forward passes, and tokens per pass.

        Every pass verifies drafts, also the prompt's, right behind which transformers drafts.
        """
        share = new_tokens / passes
        return {"method": self.name, "passes": passes, "acceptance_length": share}


def prompt_lookup(tokens: int) -> DraftMethod:
    """Drafts the tokens that follow the same words in the prompt."""
    if tokens < 1:
        raise wrong(
            "prompt_lookup",
            f"expected at least 1 token to draft, got {tokens}",
            "Pass, for instance, 10",
        )
    return DraftMethod(name="prompt-lookup", options={"prompt_lookup_num_tokens": tokens})


def assistant(loaded: LoadedModel, other: LoadedModel) -> DraftMethod:
    """Drafts of a smaller model; by text if it has another vocabulary."""
    options: dict[str, Any] = {"assistant_model": other.model}
    if other.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        options |= {"tokenizer": loaded.tokenizer, "assistant_tokenizer": other.tokenizer}
    return DraftMethod(name="assistant", options=options)
