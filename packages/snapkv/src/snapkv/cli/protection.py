"""From `--protect` and its kin to what of the prompt must stay."""

from snapkv.app.protection import Protection
from snapkv.cli.options import RunOptions


def protection_of(options: RunOptions, *, system: bool | None) -> Protection:
    """What the options protect.

    Args:
        options: of the command.
        system: whether a system message stays where the options do not say, see `Protection`.

    Raises:
        InvalidArgumentError: an empty text.
    """
    return Protection(
        texts=tuple(options.protect or ()),
        first_tokens=options.protect_first,
        system=system if options.protect_system is None else options.protect_system,
    )
