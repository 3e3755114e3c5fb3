"""Checks the settings of a request in vLLM's front end, for `LLM.generate` as well as for
endpoints.

vLLM's front end asks every custom logits processor whether it accepts a request. The one built here
does only that. No engine loads it, because with any such processor the tokens of each step would
have to be copied to the host. vLLM finds it by a name, which encodes the settings of the server,
because nothing else of them reaches that place.
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
    """Refuses requests with wrong settings. Each server has a subclass of its own with the settings
    of the server.

    Only its class method is used, and it is never instantiated.
    """

    settings: ServingSettings

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check the settings of a request. vLLM's server answers a ValueError with status 400.

        The prompt is not known yet, so it is not checked that spans lie inside it. The reason for a
        refusal is recorded in the current `RequestContext`.

        Raises:
            ValueError: a setting is wrong. An `InvalidArgumentError` is one, and an
                `InvalidTypeError` is converted.
        """
        try:
            with record_refusals():
                cls.settings.policy_for_request(sampling_params.extra_args)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _processor_types() -> Iterator[type[Any]]:
    """Yield vLLM's base classes of custom logits processors, one for each of its two runners. A
    class that the installed version of vLLM does not have is left out.
    """
    with contextlib.suppress(ImportError):
        from vllm.v1.sample.logits_processor import LogitsProcessor

        yield LogitsProcessor
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as OfSecond

        yield OfSecond


class _Checks:
    """Builds a `RequestCheck` for the settings that are encoded in the name of an attribute."""

    def __getattr__(self, name: str) -> type[RequestCheck]:
        """Build a new subclass of `RequestCheck` for the settings that the name of an attribute
        encodes.

        Args:
            name: "of_" and the hexadecimal digits of the settings as JSON; see `check_name`.

        Raises:
            AttributeError: the name does not encode JSON.
            InvalidArgumentError: the encoded settings have an unknown name or a value that is out
                of range.
            InvalidTypeError: a value of the settings has the wrong type.
        """
        try:
            config = json.loads(bytes.fromhex(name.removeprefix("of_")))
        except ValueError:
            raise AttributeError(name) from None
        settings = ServingSettings.from_config(config)
        return type("RequestCheck", (RequestCheck, *_processor_types()), {"settings": settings})


checks = _Checks()

_NAME = f"{__name__}:checks.of_"


def check_name(settings: ServingSettings) -> str:
    """Return the name by which vLLM finds the check of requests for these settings, as an entry for
    its option `logits_processors`: "module:attribute", where the attribute encodes the settings.
    """
    return _NAME + json.dumps(settings.to_config()).encode().hex()


def remove_checks(processors: Sequence[Any] | None) -> list[Any] | None:
    """Return a new list of the `logits_processors` without the checks of this plugin, or None if
    there are no others. An engine loads only these.
    """
    others = [one for one in processors or () if not str(one).startswith(_NAME)]
    return others or None
