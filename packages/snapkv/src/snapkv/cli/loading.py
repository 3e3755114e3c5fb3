"""Loading the model that the options name, without other libraries' chatter."""

import logging
import sys
import warnings
from dataclasses import replace
from typing import Any

import transformers
from huggingface_hub.utils.tqdm import enable_progress_bars
from rich.console import Console

from snapkv.app import conversion
from snapkv.app.models import LoadedModel, load
from snapkv.cli import interrupts
from snapkv.cli.options import ModelOptions

_LOAD_OPTIONS = ("device", "dtype", "revision", "attn_implementation", "trust_remote_code")


def load_model(options: ModelOptions) -> LoadedModel:
    """Load what the options name, the demo model by default; standard error says so meanwhile.

    Raises:
        SnapKVError: the options name no model that works.
    """
    begin(verbose=options.verbose)
    with Console(stderr=True).status(f"loading {options.model or 'the demo model'}"):
        return load(**load_arguments(options))


def load_arguments(options: ModelOptions) -> dict[str, Any]:
    """What the options say, as arguments of `load`."""
    given = {name: value for name in _LOAD_OPTIONS if (value := getattr(options, name))}
    return given if options.model is None else given | {"name": options.model}


def load_other(name: str, options: ModelOptions) -> LoadedModel:
    """Load a second model, on the device and in the dtype of the first.

    Raises:
        SnapKVError: the name is of no model that works.
    """
    return load_model(replace(options, model=name, revision=None, attn_implementation=None))


def begin(*, verbose: bool) -> None:
    """Go on to what takes long: Ctrl-C ends it in order, and other people's notes are kept off.

    Errors are ours to report. The progress of a download stays: it can take long.
    """
    interrupts.started()
    converting = logging.getLogger(conversion.__name__)
    if not converting.handlers:
        converting.addHandler(_ToStandardError())
        converting.setLevel(logging.INFO)
    if verbose:
        return
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for library in ("huggingface_hub", "torch", "lm_eval"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if sys.stderr.isatty():
        enable_progress_bars()


class _ToStandardError(logging.Handler):
    """Our own notes, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"snapkv: {record.getMessage()}\n")
