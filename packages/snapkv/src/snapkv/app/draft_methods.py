"""The ways to draft, as one thing that an answer can be asked to use."""

from dataclasses import asdict, dataclass, field
from typing import Any

from snapkv.app.models import LoadedModel
from snapkv.decoding.heads import load_heads
from snapkv.decoding.medusa import Medusa
from snapkv.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class DraftMethod:
    """Where drafts come from, as keyword arguments of `model.generate`."""

    name: str
    options: dict[str, Any] = field(repr=False)

    def tally(self, new_tokens: int, passes: int) -> dict[str, Any]:
        """What the last text took: `passes` that verified drafts, and tokens per such pass.

        Of Medusa what `Tally` counts. The forward passes that are given include the prompt's.
        """
        decoding = self.options.get("custom_generate")
        if not isinstance(decoding, Medusa):  # transformers drafts after the prompt at once
            share = new_tokens / passes
            return {"method": self.name, "passes": passes, "acceptance_length": share}
        length = decoding.tally.acceptance_length
        return {"method": self.name, **asdict(decoding.tally), "acceptance_length": length}


def medusa(loaded: LoadedModel, heads: str) -> DraftMethod:
    options = {"custom_generate": Medusa(load_heads(heads, loaded.model))}
    return DraftMethod(name="medusa", options=options)


def prompt_lookup(tokens: int) -> DraftMethod:
    """Drafts of what comes after the same words in the prompt."""
    if tokens < 1:
        raise InvalidArgumentError(
            f"prompt_lookup: expected how many tokens to draft, at least 1, got {tokens}; pass 10"
        )
    return DraftMethod(name="prompt-lookup", options={"prompt_lookup_num_tokens": tokens})


def assistant(loaded: LoadedModel, other: LoadedModel) -> DraftMethod:
    """Drafts of a smaller model; where it has another vocabulary, through text."""
    options: dict[str, Any] = {"assistant_model": other.model}
    if other.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        options |= {"tokenizer": loaded.tokenizer, "assistant_tokenizer": other.tokenizer}
    return DraftMethod(name="assistant", options=options)
