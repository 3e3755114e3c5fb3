"""Looking up the gate that was fitted to a model, for the policy `KVzap`.

`snapkv study fit-gate` fits a gate and stores it in the folder `gates` of `snapkv.cache_folder`, in
one file per model. `KVzap` uses it unless it is given another. The gate of the demo model is part
of the package.
"""

from dataclasses import fields, replace
from pathlib import Path

from transformers import PreTrainedModel

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.cache_folder import cache_folder
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.identity import digest_of, require_model
from snapkv.policies import KVzap, Policy
from snapkv.policies.gate import Gate, read_gate

_PACKAGED = Path(__file__).with_name("gates")


def with_known(model: PreTrainedModel, policy: Policy) -> Policy:
    """Return the policy with the gate of the model wherever it needs a gate and has none.

    Policies inside the policy are included. A policy that needs no gate is returned unchanged.

    Raises:
        InvalidArgumentError: a given gate was fitted to another model.
        InvalidTypeError: a gate is needed, and `model` is not a transformers model.
        UnsupportedModelError: a gate is needed, and none has been fitted to the model.
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
    """Return the policy with its own gate, or with the one that was fitted to the model.

    Raises:
        InvalidArgumentError: the gate of the policy was fitted to another model.
        InvalidTypeError: `model` is not a transformers model.
        UnsupportedModelError: the policy has no gate, and none has been fitted to the model.
    """
    require_model(model)
    named = getattr(model.config, "_name_or_path", "") or "MODEL"
    gate = known_gate(model) if policy.gate is None else policy.gate
    if gate is None:
        raise wrong(
            "model",
            "no gate is known for this model, and the policy does not have a gate",
            f"Run `snapkv study fit-gate --model {named}` to train a gate, or pass the file of a "
            "gate to the policy",
            UnsupportedModelError,
        )
    assert isinstance(gate, Gate), "the policy reads the file of a gate when it is made"
    if gate.model not in ("", digest_of(model)):
        raise wrong(
            "gate",
            "expected a gate that was trained for this model, but got the gate of another model",
            f"Run `snapkv study fit-gate --model {named}` to train a new gate",
        )
    return replace(policy, gate=gate)


def known_gate(model: PreTrainedModel) -> Gate | None:
    """Return the gate that was fitted to this model in any dtype; None if there is none.

    Raises:
        InvalidTypeError: `model` is not a transformers model.
    """
    name = f"{digest_of(model)}.safetensors"
    paths = (folder / name for folder in (gates_folder(), _PACKAGED))
    return next((read_gate(path) for path in paths if path.exists()), None)


def remember_gate(gate: Gate) -> Path:
    """Save a gate to the file in which `known_gate` looks for it.

    A gate that was saved for the same model before is replaced.

    Returns:
        The path of the file.

    Raises:
        OutputError: the file cannot be written.
    """
    path = gates_folder() / f"{gate.model}.safetensors"
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, gate.as_file())
    return path


def gates_folder() -> Path:
    """Return the folder for the files of fitted gates."""
    return cache_folder() / "gates"
