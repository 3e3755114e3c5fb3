"""The ways to read a prompt, by name, with their parameters; torch is not imported."""

import contextlib
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

from snapkv.validation import require_at_least, require_ratio


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """How prompts are read into a compressed cache.

    But for `Exact` by the block of that name in `snapkv.prefill`, which takes the parameters.
    """

    name: ClassVar[str]
    holds_all: ClassVar[bool] = True
    """Whether every layer has read every token, so that later turns can recall it."""

    def installed(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """A block in which the model reads prompts this way."""
        from snapkv import prefill

        block: contextlib.AbstractContextManager[None]
        block = getattr(prefill, self.name.replace("-", "_"))(model, **asdict(self))
        return block

    def completed(self, model: Any) -> Self:
        """A copy with parameters left open filled in from what is known of a model."""
        del model
        return self

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Exact(Prefill):
    """Every layer reads every token, in one forward pass."""

    name: ClassVar[str] = "exact"

    def installed(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Nothing is changed."""
        del model
        return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class Selective(Prefill):
    """After some layer only the tokens that the prompt's end votes for are computed.

    Without a layer it is the one that is known of the model.
    """

    name: ClassVar[str] = "selective"
    holds_all: ClassVar[bool] = False

    layer: int | None = None
    keep_ratio: float = 0.15
    least_tokens: int = 256

    def __post_init__(self) -> None:
        require_ratio("keep_ratio", self.keep_ratio)
        require_at_least("least_tokens", self.least_tokens, 0)
        if self.layer is not None:
            require_at_least("layer", self.layer, 1)

    def completed(self, model: Any) -> Self:
        from snapkv.prefill.early_layer import default_early_layer

        return self if self.layer else replace(self, layer=default_early_layer(model))


@dataclass(frozen=True, kw_only=True)
class LayerByLayer(Prefill):
    """Every layer reads the whole prompt, in pieces, before the next: exact, less memory."""

    name: ClassVar[str] = "layer-by-layer"

    chunk_tokens: int = 4096

    def __post_init__(self) -> None:
        require_at_least("chunk_tokens", self.chunk_tokens, 1)


PREFILLS: dict[str, type[Prefill]] = {kind.name: kind for kind in (Exact, Selective, LayerByLayer)}
