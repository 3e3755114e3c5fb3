"""From options to a way to draft."""

from rich.console import Console

from snapkv.cli.loading import load_other
from snapkv.cli.options import RunOptions
from snapkv.decoding import methods
from snapkv.decoding.methods import DraftMethod
from snapkv.errors import InvalidArgumentError
from snapkv.models import LoadedModel
from snapkv.policies import Policy


def require_one_way(options: RunOptions) -> None:
    """Refuse several ways at once.

    Raises:
        InvalidArgumentError: more than one was given.
    """
    ways = {
        "--medusa": options.medusa is not None,
        "--assistant": options.assistant is not None,
        "--prompt-lookup": options.prompt_lookup is not None,
        "--self-speculate": options.self_speculate,
    }
    given = [way for way, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"drafts: expected one of {', '.join(ways)}, got {' and '.join(given)}; leave one out"
        )


def require_one_reading_of_drafts(options: RunOptions, policy: Policy) -> None:
    """Refuse drafts behind a text that is read twice: they are verified from its beginning.

    Raises:
        InvalidArgumentError: both were asked for.
    """
    drafted = (options.medusa, options.assistant, options.prompt_lookup)
    asked = options.self_speculate or any(way is not None for way in drafted)
    if asked and "second_reading" in policy.needs:
        raise InvalidArgumentError(
            f"drafts: expected none with {policy.name}, which has the documents read twice, got "
            "some; leave the draft option out"
        )


def draft_method(options: RunOptions, loaded: LoadedModel, console: Console) -> DraftMethod | None:
    """Where the options say that drafts come from; None for plain decoding.

    Raises:
        SnapKVError: they name no heads or no model that works.
    """
    if options.medusa is not None:
        return methods.medusa(loaded, options.medusa)
    if options.assistant is not None:
        return methods.assistant(loaded, load_other(options.assistant, options, console))
    if options.prompt_lookup is not None:
        return methods.prompt_lookup(options.prompt_lookup)
    return methods.self_speculation() if options.self_speculate else None
