"""Whether a model of the hub can be had, said within seconds and not after the client's retries."""

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

TIMEOUT_SECONDS = 5
"""How long the hub may take to answer."""

_WITHOUT_OWNER = frozenset(
    ("ctrl", "distilgpt2", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl", "openai-gpt", "xlnet")
)
"""Causal language models from the time when a hub id needed no owner."""


def may_be_hub_id(name: str) -> bool:
    """Whether a name looks like a hub id, or is one of those without an owner."""
    return name.strip("/").count("/") == 1 or name in _WITHOUT_OWNER or is_cached(name, None)


def is_cached(name: str, revision: str | None) -> bool:
    """Whether a model's configuration is in the hub's cache on this machine."""
    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:
        return False


def is_reachable(name: str, revision: str | None) -> bool:
    """Whether the hub answers; not asked where this process is to stay offline."""
    if constants.HF_HUB_OFFLINE:
        return False
    url = hf_hub_url(name, "config.json", revision=revision)
    try:
        get_hf_file_metadata(url, timeout=TIMEOUT_SECONDS)
    except HfHubHTTPError:
        return True  # that there is no such model, or that it may not be read, is an answer
    except Exception:  # whichever errors the HTTP client of this release has
        return False
    return True
