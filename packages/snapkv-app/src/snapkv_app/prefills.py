"""The ways to read a prompt, by name, with their parameters; torch is not imported."""

import contextlib
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from snapkv.validation import require_at_least


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """A way to read prompts into a compressed cache.

    Every way except `Exact` calls the function of `snapkv.prefill` that has its name, with its
    fields as arguments.
    """

    name: ClassVar[str]

    def installed(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which the model reads prompts this way.

        The model is changed in place on entry, and restored on exit.

        Raises:
            UnsupportedModelError: on entry, if the model cannot read prompts this way.
        """
        from snapkv import prefill

        block: contextlib.AbstractContextManager[None]
        block = getattr(prefill, self.name.replace("-", "_"))(model, **asdict(self))
        return block

    def describe(self) -> dict[str, Any]:
        """Return the name and the parameters as a new dictionary, for results."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Exact(Prefill):
    """The ordinary way: every layer reads every token in one forward pass."""

    name: ClassVar[str] = "exact"

    def installed(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that changes nothing."""
        del model
        return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class LayerByLayer(Prefill):
    """A way to read prompts with less memory: each layer reads the prompt in pieces.

    A layer reads the complete prompt before the next layer begins. The result is exact.

    Attributes:
        chunk_tokens: the number of tokens of a piece.

    Raises:
        InvalidArgumentError: `chunk_tokens` is less than 1 or more than 2**24.
        InvalidTypeError: `chunk_tokens` is not an integer.
    """

    name: ClassVar[str] = "layer-by-layer"

    chunk_tokens: int = 4096

    def __post_init__(self) -> None:
        require_at_least("chunk_tokens", self.chunk_tokens, 1)


PREFILLS: dict[str, type[Prefill]] = {kind.name: kind for kind in (Exact, LayerByLayer)}
