"""From options to a way to draft."""

from snapkv.app import draft_methods
from snapkv.app.draft_methods import DraftMethod
from snapkv.app.models import LoadedModel
from snapkv.cli.loading import load_other
from snapkv.cli.options import DRAFTS, RunOptions
from snapkv.errors import InvalidArgumentError
from snapkv.policies import Policy


def require_drafts_that_fit(options: RunOptions, policy: Policy) -> None:
    """Refuse several ways at once, and any behind documents that are not read at once.

    Raises:
        InvalidArgumentError: such options.
    """
    ways = [f"--{name.replace('_', '-')}" for name in DRAFTS]
    values = (getattr(options, name) for name in DRAFTS)
    given = [way for way, value in zip(ways, values, strict=True) if value not in (None, False)]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"drafts: expected one of {', '.join(ways)}, got {' and '.join(given)}; leave one out"
        )
    if given and policy.reads_twice:
        raise InvalidArgumentError(
            f"drafts: expected none with {policy.name}, which has the documents read twice, got "
            f"{given[0]}; leave it out"
        )
    if given and options.prefill != "exact":
        raise InvalidArgumentError(
            f"drafts: expected none with --prefill {options.prefill}, since they are verified in "
            f"one pass with the prompt, got {given[0]}; leave one of them out"
        )


def draft_method(options: RunOptions, loaded: LoadedModel) -> DraftMethod | None:
    """Where the options say that drafts come from; None for plain decoding.

    Raises:
        SnapKVError: they name no heads or no model that works.
    """
    if options.medusa is not None:
        return draft_methods.medusa(loaded, options.medusa)
    if options.assistant is not None:
        return draft_methods.assistant(loaded, load_other(options.assistant, options))
    if options.prompt_lookup is not None:
        return draft_methods.prompt_lookup(options.prompt_lookup)
    return draft_methods.self_speculation() if options.self_speculate else None
