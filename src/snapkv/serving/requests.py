"""Checks a request's own settings before the engine sees them, so that wrong ones are a 400.

vLLM asks every custom logits processor whether it accepts a request. The one made here accepts or
refuses, and never touches logits. vLLM finds it by a name, in which the server's settings are
written, since nothing else of them reaches that place.
"""

import json
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from snapkv.serving.settings import ServingSettings


class RequestCheck(LogitsProcessor):
    """Refuses requests whose settings are wrong; a subclass for each server's settings."""

    settings: ServingSettings

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise a ValueError that vLLM turns into status 400."""
        try:
            cls.settings.for_request(sampling_params.extra_args)
        except TypeError as error:
            raise ValueError(str(error)) from error

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def apply(self, logits: Tensor) -> Tensor:
        """Leave the logits alone."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Greedy requests need not even ask."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """There is none."""


class _Checks:
    """Makes the check for the settings that an attribute's name spells out."""

    def __getattr__(self, name: str) -> type[RequestCheck]:
        try:
            config = json.loads(bytes.fromhex(name.removeprefix("of_")))
        except ValueError:
            raise AttributeError(name) from None
        settings = ServingSettings.from_config(config)
        return type("RequestCheck", (RequestCheck,), {"settings": settings})


checks = _Checks()


def name_of_check(settings: ServingSettings) -> str:
    """What to pass as one of vLLM's `logits_processors`."""
    spelt = json.dumps(settings.to_config()).encode().hex()
    return f"{__name__}:checks.of_{spelt}"
