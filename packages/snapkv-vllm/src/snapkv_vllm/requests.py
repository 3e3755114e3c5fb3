"""Checks a request's own settings in the front end, whoever asks: `LLM.generate` or an endpoint.

vLLM's front end asks every custom logits processor whether it accepts a request. The one made here
accepts or refuses, and does nothing else: no engine loads it, since the tokens of a step would have
to come back to the host for any of its kind. vLLM finds it by a name, in which the server's
settings are written, since nothing else of them reaches that place.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from snapkv_vllm.versions import require_supported_version

require_supported_version()

from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.front.request_context import record_refusals


class RequestCheck:
    """Refuses requests whose settings are wrong; a subclass for each server's settings.

    Abstract: it is asked as a class, and never made.
    """

    settings: ServingSettings

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise a ValueError, which `LLM` hands on and vLLM's server turns into status 400."""
        try:
            with record_refusals():
                cls.settings.policy_for_request(sampling_params.extra_args)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _processor_types() -> Iterator[type[Any]]:
    """What each of vLLM's runners, as far as it is there, takes for a logits processor."""
    with contextlib.suppress(ImportError):
        from vllm.v1.sample.logits_processor import LogitsProcessor

        yield LogitsProcessor
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as OfSecond

        yield OfSecond


class _Checks:
    """Makes the check for the settings that an attribute's name spells out."""

    def __getattr__(self, name: str) -> type[RequestCheck]:
        try:
            config = json.loads(bytes.fromhex(name.removeprefix("of_")))
        except ValueError:
            raise AttributeError(name) from None
        settings = ServingSettings.from_config(config)
        return type("RequestCheck", (RequestCheck, *_processor_types()), {"settings": settings})


checks = _Checks()

_NAME = f"{__name__}:checks.of_"


def check_name(settings: ServingSettings) -> str:
    """What to pass as one of vLLM's `logits_processors`."""
    return _NAME + json.dumps(settings.to_config()).encode().hex()


def remove_checks(processors: Sequence[Any] | None) -> list[Any] | None:
    """The `logits_processors` that an engine loads: all others."""
    others = [one for one in processors or () if not str(one).startswith(_NAME)]
    return others or None
