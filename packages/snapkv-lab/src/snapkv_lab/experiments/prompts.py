"""The prompt that is timed: the first document of the quality benchmark, at any length."""

from snapkv.app.models import LoadedModel
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.magic_number import make_documents


def prompt_of(loaded: LoadedModel, prompt_tokens: int) -> list[int]:
    """Token ids of that length."""
    document, *_ = make_documents(
        loaded.tokenizer, load_haystack(), prompt_tokens=prompt_tokens, count=1
    )
    return document.prompt_ids
