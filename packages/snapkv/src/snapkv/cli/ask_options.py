"""What `snapkv ask` takes, of files or of a library."""

from dataclasses import dataclass
from typing import Annotated

from snapkv.app.prefills import Exact
from snapkv.cli import panels
from snapkv.cli.options import DRAFTS, RunOptions
from snapkv.cli.whole_numbers import WholeNumber
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_share


@dataclass(frozen=True, kw_only=True)
class AskOptions(RunOptions):
    """What `ask` takes."""

    library: Annotated[
        str | None,
        panels.library(metavar="FOLDER", help="Answer from documents that `library add` has read"),
    ] = None
    documents: Annotated[
        int | None,
        panels.library(help="How many of its documents to answer from", show_default="3"),
        WholeNumber(1),
    ] = None
    rerank: Annotated[
        bool,
        panels.library("--rerank", help="Order what is found by its meaning, by embeddings"),
    ] = False
    recompute: Annotated[
        float | None,
        panels.library(
            help="The fraction of their tokens to compute anew: 0 none, 1 all", show_default="0.15"
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse what does not go with a library, or needs one."""
        super().__post_init__()
        if self.recompute is not None:
            require_share("recompute", self.recompute, "0.15")
        needs_one = {
            "documents": self.documents,
            "rerank": self.rerank or None,
            "recompute": self.recompute,
        }
        alone = {
            **{name: getattr(self, name) or None for name in DRAFTS},
            "prefill": None if self.reading == Exact() else self.prefill,
            "protect": self.protect,
            "protect_first": self.protect_first or None,
            "protect_system": self.protect_system,
        }
        for name, value in (needs_one if self.library is None else alone).items():
            if value is not None:
                expected = "--library beside it" if self.library is None else "none with --library"
                raise InvalidArgumentError(
                    f"{name}: expected {expected}, got {value}; leave it out"
                )
