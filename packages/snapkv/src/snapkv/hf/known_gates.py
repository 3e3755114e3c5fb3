"""Which gate a model has, and what a policy knows of the model it is used with.

`snapkv study fit-gate` fits a gate; `KVzap` without one goes by it. A file for each model lies in
the folder `gates` of `snapkv.cache_folder`; the demo model's comes with the package.
"""

from dataclasses import fields, replace
from pathlib import Path

from transformers import PreTrainedModel

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.cache_folder import cache_folder
from snapkv.errors import InvalidArgumentError, UnsupportedModelError
from snapkv.hf.identity import digest_of, require_model
from snapkv.policies import KVzap, Policy
from snapkv.policies.gate import Gate, read_gate

_PACKAGED = Path(__file__).with_name("gates")


def with_known(model: PreTrainedModel, policy: Policy) -> Policy:
    """The policy with what was found of the model, wherever it goes by that and was given nothing.

    Raises:
        InvalidArgumentError: a gate is another model's.
        UnsupportedModelError: no gate has been fitted to it.
    """
    if isinstance(policy, KVzap):
        return _with_gate(model, policy)
    inner = {
        part.name: own
        for part in fields(policy)
        if part.init and isinstance(own := getattr(policy, part.name), Policy)
    }
    known = {name: with_known(model, own) for name, own in inner.items()}
    return policy if known == inner else replace(policy, **known)


def _with_gate(model: PreTrainedModel, policy: KVzap) -> KVzap:
    require_model(model)
    named = getattr(model.config, "_name_or_path", "") or "MODEL"
    gate = known_gate(model) if policy.gate is None else policy.gate
    if gate is None:
        raise UnsupportedModelError(
            f"model: expected one that a gate has been fitted to, or gate, got none of both; run "
            f"snapkv study fit-gate --model {named}, or pass a file of a gate"
        )
    assert isinstance(gate, Gate), "read when the policy was made"
    if gate.model not in ("", digest_of(model)):
        raise InvalidArgumentError(
            f"gate: expected one that was fitted to this model, got one of another; run snapkv "
            f"study fit-gate --model {named}"
        )
    return replace(policy, gate=gate)


def known_gate(model: PreTrainedModel) -> Gate | None:
    """The gate of this model, in whatever dtype, if one has been fitted."""
    name = f"{digest_of(model)}.safetensors"
    paths = (folder / name for folder in (gates_folder(), _PACKAGED))
    return next((read_gate(path) for path in paths if path.exists()), None)


def remember_gate(gate: Gate) -> Path:
    """Keep a gate for later runs of its model, in place of any; returns the file."""
    path = gates_folder() / f"{gate.model}.safetensors"
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, gate.as_file())
    return path


def gates_folder() -> Path:
    """Where the files are."""
    return cache_folder() / "gates"
