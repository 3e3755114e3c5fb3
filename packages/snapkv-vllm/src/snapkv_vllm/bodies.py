"""What a request's JSON body says about compression, checked before anything is computed."""

from collections.abc import Iterator, Mapping
from typing import Any

from snapkv.errors import InvalidArgumentError
from snapkv_vllm.names import meant, shown
from snapkv_vllm.settings import ServingSettings

XARGS = "vllm_xargs"
"""Where a body holds what reaches `SamplingParams.extra_args`."""

_BESIDE = ("extra_body", "extra_args")
"""Fields of clients in Python, of which vLLM's server reads none."""


def require_settings(body: object, settings: ServingSettings) -> None:
    """Raise where a body has a wrong setting, or one that would be ignored.

    Args:
        body: from JSON; of any endpoint of vLLM.
        settings: the server's.

    Raises:
        InvalidArgumentError: a setting outside `vllm_xargs`, under another name, or out of range.
        InvalidTypeError: a setting of the wrong type.
    """
    if not isinstance(body, dict):
        return
    sampling = _mapping(body.get("sampling_params"))  # of /inference/v1/generate
    for name, right in _misplaced(body, sampling):
        raise InvalidArgumentError(
            f"{shown(name)}: expected inside {XARGS}, got it outside, where nobody reads it; "
            f'write "{XARGS}": {{"{shown(right)}": ...}}'
        )
    for given in (_mapping(body.get(XARGS)), _mapping(sampling.get("extra_args"))):
        settings.for_request(given)
        if body.get("use_beam_search"):
            _refuse_with_beams(given)


def _misplaced(body: Mapping[str, Any], sampling: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of settings where they have no effect, each with the right one."""
    outside = [body, sampling]
    for field in _BESIDE:
        beside = _mapping(body.get(field))
        outside += [beside, _mapping(beside.get(XARGS))]
    return ((name, right) for fields in outside for name in fields if (right := meant(name)))


def _refuse_with_beams(given: Mapping[str, Any]) -> None:
    for name in filter(meant, given):
        raise InvalidArgumentError(
            f"{shown(name)}: expected none with use_beam_search, whose requests carry no settings "
            "inside vLLM, got one; leave one of them out"
        )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
