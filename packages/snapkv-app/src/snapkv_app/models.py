"""Load models and tokenizers: the demo model, a GGUF file, a folder or a model of the hub."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from snapkv.errors import (
    MissingDependencyError,
    SnapKVError,
    UnsupportedModelError,
    wrong,
)
from snapkv.hf.cache import CompressedCache
from snapkv.hf.checkpoint import load_complete
from snapkv.hf.device_memory import free_bytes, out_of_memory_explained
from snapkv.hf.known_gates import with_known
from snapkv.hf.model_parts import max_positions
from snapkv.hf.placement import device_of
from snapkv.policies import FullCache, Policy
from snapkv.validation import DTYPES, first_line, nearest, require_choice, require_dtype
from snapkv_app.model_places import hub_options, known_names, locate, not_found, place_of
from snapkv_app.packages import DEMO
from snapkv_app.plan.advice import require_memory, weights_advice
from snapkv_app.plan.shapes import SHAPES

__all__ = ["DEMO", "LoadedModel", "load", "load_settings", "place_of"]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to generate, with its tokenizer and its name for results."""

    model: Any  # of transformers, in evaluation mode, on its device
    tokenizer: Any
    name: str  # as the user passed it: "demo", a file, a folder or a hub id
    revision: str | None  # the hub's commit, or "sha256:..." of a GGUF file; None for a folder
    answers_on: str | None = None  # the device of workers that answer in its place

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that a prompt and its answer may have; None if there is no limit."""
        return max_positions(self.model)

    def has_positions(self, tokens: int) -> bool:
        """Return whether prompt and answer may have `tokens` tokens together."""
        return self.max_tokens is None or tokens <= self.max_tokens

    def completed(self, policy: Policy) -> Policy:
        """Return the policy with the token ids and the gate that it needs and does not have yet.

        The ids come from the tokenizer of this model, and the gate is the one that was fitted to
        it. Policies inside the policy get a gate as well. A policy that needs neither is returned
        itself, otherwise a copy.

        Raises:
            InvalidArgumentError: the policy has a gate that was fitted to another model.
            UnsupportedModelError: the policy needs a gate and has none, and none was fitted to this
                model.
        """
        return with_known(self.model, policy.with_tokenizer(self.tokenizer))

    def description(self) -> dict[str, Any]:
        """Return the facts about the model that every result contains, as a new dict.

        The keys are "name", "revision", "dtype" such as "bfloat16", "device", "attn_implementation"
        such as "sdpa", and "max_tokens", which is None if there is no limit.
        """
        attention = self.model.config.get_text_config(decoder=True)._attn_implementation
        return {
            "name": self.name,
            "revision": self.revision,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.answers_on or str(device_of(self.model)),
            "attn_implementation": attention.rpartition("|")[2],
            "max_tokens": self.max_tokens,
        }


def load(
    name: str = DEMO,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a decoder-only model and its tokenizer.

    Whether the model can be compressed is decided from its configuration, before any weights are
    read. GGUF files and the demo model are converted into a cache folder the first time, see
    `snapkv_app.conversion`. Models of the hub are loaded as transformers does it, including its
    settings for offline use.

    Args:
        name: "demo", a ``.gguf`` file, a folder with a ``config.json``, or a hub id. "demo" always
            means the demo model; write ``./demo`` for a folder of that name.
        device: "auto" for the GPU if there is one, or a device of torch, such as "cuda:1".
        dtype: "auto", "float32", "bfloat16" or "float16". "auto" is the checkpoint's own dtype,
            which is float32 for the demo model and bfloat16 for other GGUF files. On a CPU with 2
            cores, bfloat16 read a prompt of 4k tokens 1.5 times faster than float32, but took 1.5
            times as long for every generated token.
        revision: a branch, tag or commit of a model on the hub.
        attn_implementation: "sdpa", "eager" or another one of transformers, which chooses one by
            default.
        trust_remote_code: whether to run the model code that comes with the checkpoint.

    Raises:
        ModelNotFoundError: there is no file, folder or model on the hub with that name.
        InvalidArgumentError: `device`, `dtype` or `attn_implementation` is unknown, `revision` is
            passed with something else than a hub id, a file is damaged or of another kind, or
            weights are missing or have another shape than the configuration says.
        UnsupportedModelError: the model's cache cannot be compressed, the model has an encoder, or
            transformers does not know its architecture.
        MissingDependencyError: a package that the model needs is not installed.
        OutOfMemoryError: the weights are larger than the device's memory, which is known before any
            of them is read, or do not fit in the memory that is free.
    """
    torch_device = chosen_device(device)
    options = _dtype_option(dtype)
    if attn_implementation:
        _require_attention(attn_implementation)
        options["attn_implementation"] = attn_implementation
    source = locate(name, dtype=dtype)
    hub = hub_options(source, revision) | {"trust_remote_code": trust_remote_code}
    with _explained(name):
        config = AutoConfig.from_pretrained(source.place, **hub)
        outline = _outline(config, trust_remote_code, options)
        require_memory(name, outline, torch_device)
        tokenizer = AutoTokenizer.from_pretrained(source.place, **hub)
        free = free_bytes(torch_device)
        with out_of_memory_explained(lambda: weights_advice(outline, torch_device, free)):
            model = load_complete(
                name,
                source.place,
                listing="config.json",
                remedy="Download the model again, or correct its config.json",
                **hub,
                **options,
            ).to(torch_device)
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        name=name,
        revision=source.revision or getattr(config, "_commit_hash", None),
    )


def load_settings(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Return the settings of a model's configuration, including the defaults of transformers.

    Args:
        name: "demo", a ``.gguf`` file, a folder with a ``config.json``, or a hub id.
        revision: a branch, tag or commit of a model on the hub.
        trust_remote_code: whether to run the configuration code that comes with the checkpoint.

    Raises:
        ModelNotFoundError: there is no file, folder or model on the hub with that name.
        InvalidArgumentError: `revision` is passed with something else than a hub id, or a GGUF file
            is damaged.
        UnsupportedModelError: transformers does not know the model.
        MissingDependencyError: a package that the model needs is not installed.
    """
    source = locate(name, SHAPES)
    hub = hub_options(source, revision, SHAPES) | {"trust_remote_code": trust_remote_code}
    with _explained(name):
        settings: dict[str, Any] = AutoConfig.from_pretrained(source.place, **hub).to_dict()
    return settings


def chosen_device(name: str) -> torch.device:
    """Return the device that has a name. "auto" is the GPU with CUDA, or the CPU if there is none.

    Raises:
        InvalidArgumentError: torch has no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise wrong(
            "device",
            f"expected auto, cpu or a device that torch {torch.__version__} has on this machine, "
            f"such as cuda:0, but got {name!r}",
            "Pass auto",
        ) from error
    return torch.device(name)


def _dtype_option(name: str) -> dict[str, Any]:
    """Return a new dict with the option "dtype" of transformers for the dtype called `name`.

    It is empty for "auto", with which transformers uses the checkpoint's own dtype.

    Raises:
        InvalidArgumentError: `name` is not the name of a dtype in which a model can be loaded.
    """
    require_dtype(name)
    return {} if name == "auto" else {"dtype": chosen_dtype(name)}


def chosen_dtype(name: str) -> torch.dtype:
    """Return the dtype of torch with a name, such as "bfloat16".

    Raises:
        InvalidArgumentError: `name` is not the name of a dtype in which a model can be loaded, or
            it is "auto", which is no dtype of torch.
    """
    require_choice("dtype", name, DTYPES[1:])
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _require_attention(name: str) -> None:
    """Raise unless transformers knows the attention implementation, or loads it from the hub.

    A name with "/" or "|" is one of the hub, and is not checked.

    Raises:
        InvalidArgumentError: transformers does not know the name.
    """
    if "/" not in name and "|" not in name:  # a kernel of the hub has an owner
        known = ("eager", *(each for each in ALL_ATTENTION_FUNCTIONS if "|" not in each))
        require_choice("attn_implementation", name, tuple(sorted(known)))


def _outline(config: Any, trust_remote_code: bool, options: Mapping[str, Any]) -> Any:
    """Build the model on the meta device, without its weights, and check that it is supported.

    Its dtype is that of the checkpoint unless `options` has another one.

    Raises:
        UnsupportedModelError: the model has an encoder, or its cache cannot be compressed.
    """
    if config.is_encoder_decoder:
        raise wrong(
            "model",
            f"expected a decoder-only model, but got the encoder-decoder {config.model_type}, "
            "whose prompt is not stored in a key-value cache",
            "Use a decoder-only model instead",
            UnsupportedModelError,
        )
    own = config.get_text_config(decoder=True).dtype or config.dtype or torch.float32
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code, **{"dtype": own, **options}
        )
    CompressedCache(outline, FullCache())
    return outline


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn errors of transformers within this block into errors of this package.

    Errors of this package and out-of-memory errors are raised unchanged.

    Raises:
        InvalidArgumentError: a safetensors file is damaged.
        ModelNotFoundError: transformers cannot find or read the model `name`.
        MissingDependencyError: a package is not installed.
        UnsupportedModelError: transformers does not know the architecture.
    """
    try:
        yield
    except (SnapKVError, torch.OutOfMemoryError, MemoryError):
        raise
    except SafetensorError as error:
        raise wrong(
            "model",
            f"the safetensors files in {name!r} could not be read: {first_line(error)}",
            "Download the model again",
        ) from error
    except OSError as error:
        remedy = nearest(
            name, known_names(), "Check the name, and check whether you have access to the model"
        )
        raise not_found(f"{name!r}: {first_line(error).rstrip('.')}", remedy) from error
    except (ImportError, ValueError, KeyError) as error:
        kind = MissingDependencyError if isinstance(error, ImportError) else UnsupportedModelError
        raise kind(
            f"model: expected a causal language model that transformers can load here, but got "
            f"{name!r}: {first_line(error)}"
        ) from error
