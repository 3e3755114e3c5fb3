"""Loading models and tokenizers: the offline demo model, a GGUF file, a folder or a hub id."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    scan_cache_dir,
    try_to_load_from_cache,
)
from huggingface_hub.errors import CacheNotFound, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from snapkv.app.conversion import convert_once
from snapkv.app.model_places import DEMO as DEMO  # `snapkv.cli.plan` imports it from here
from snapkv.app.model_places import known_names, local_place, not_found
from snapkv.errors import (
    InvalidArgumentError,
    MissingDependencyError,
    ModelNotFoundError,
    SnapKVError,
    UnsupportedModelError,
)
from snapkv.hf.cache import CompressedCache
from snapkv.hf.checkpoint import load_complete
from snapkv.hf.known_gates import with_known
from snapkv.hf.placement import device_of
from snapkv.plan import (
    free_bytes,
    max_positions,
    out_of_memory_explained,
    require_room,
    weights_advice,
)
from snapkv.plan.shapes import SHAPES, config_of, shape_of
from snapkv.policies import FullCache, Policy
from snapkv.validation import first_line, nearest, require_choice, require_dtype

_ANY = f"{DEMO!r}, a .gguf file, a folder or a hub id"

_TIMEOUT_SECONDS = 5
"""How long the hub may take to answer."""

_WITHOUT_OWNER = frozenset(
    ("ctrl", "distilgpt2", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl", "openai-gpt", "xlnet")
)
"""Causal language models from the time when a hub id needed no owner."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to generate, and what is needed to name it in a result."""

    model: Any  # of transformers, in evaluation mode, on its device
    tokenizer: Any
    name: str  # as it was asked for: "demo", a file, a folder or a hub id
    revision: str | None  # the hub's commit, or "sha256:..." of a GGUF file; None for a folder
    answers_on: str | None = None  # the device of workers that answer in its place

    @property
    def max_tokens(self) -> int | None:
        """Positions the model has for prompt and answer together; None where there is no limit."""
        return max_positions(self.model)

    def has_positions(self, tokens: int) -> bool:
        """Whether prompt and answer may be so long together."""
        return self.max_tokens is None or tokens <= self.max_tokens

    def completed(self, policy: Policy) -> Policy:
        """The policy with what it needs to know of the tokenizer and of the heads."""
        return with_known(self.model, policy.with_tokenizer(self.tokenizer))

    def description(self) -> dict[str, Any]:
        """What a result must say about the model it was made with."""
        attention = self.model.config.get_text_config(decoder=True)._attn_implementation
        return {
            "name": self.name,
            "revision": self.revision,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.answers_on or str(device_of(self.model)),
            "attn_implementation": attention.rpartition("|")[2],
            "max_tokens": self.max_tokens,
        }


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where `from_pretrained` finds the files."""

    place: str  # a folder or a hub id
    revision: str | None = None  # what the result says; None where the files say it themselves
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
            that is float32 for the demo model, and bfloat16 for other GGUF files. On
            a 2-core CPU bfloat16 read a 4k prompt 1.5 times faster, but took 1.5 times as long for
            every token after it.
        revision: branch, tag or commit of a hub id.
        attn_implementation: "sdpa", "eager", ...; transformers' choice by default.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        ModelNotFoundError: no such file, folder or hub id.
        InvalidArgumentError: an unknown `device`, `dtype` or `attn_implementation`, a `revision`
            of something else than a hub id, a damaged or foreign file, or weights that are missing
            or of another shape than the configuration says.
        UnsupportedModelError: the model's cache cannot be compressed.
        MissingDependencyError: a package that the model needs is not installed.
        OutOfMemoryError: the weights are larger than the device's memory; none has been read.
    """
    torch_device = chosen_device(device)
    options = _dtype_option(dtype)
    if attn_implementation:
        _require_attention(attn_implementation)
        options["attn_implementation"] = attn_implementation
    source = _locate(name, dtype=dtype)
    hub = _hub_options(source, revision) | {"trust_remote_code": trust_remote_code}
    with _explained(name):
        config = AutoConfig.from_pretrained(source.place, **hub)
        outline = _outline(config, trust_remote_code, options)
        require_room(name, outline, torch_device)
        tokenizer = AutoTokenizer.from_pretrained(source.place, **hub)
        free = free_bytes(torch_device)
        with out_of_memory_explained(lambda: weights_advice(outline, torch_device, free)):
            model = load_complete(
                name,
                source.place,
                told_by="config.json",
                remedy="download the model again, or correct its config.json",
                **hub,
                **options,
            ).to(torch_device)
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        name=name,
        revision=source.revision or getattr(config, "_commit_hash", None),
    )


def load_outline(
    name: str = DEMO,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A model without its weights, on the meta device: from its configuration alone.

    The name may be that of a published shape, or its hub id (`snapkv.plan.shapes`). "auto" is the
    dtype that `load` would give it, bfloat16 for a shape; another one counts quantized weights in
    it.
    """
    options = _dtype_option(dtype)
    shape = None if revision else shape_of(name)
    if shape is not None:
        options = {"dtype": torch.bfloat16} | options
        return _outline(_in_dtype(config_of(shape), dtype), False, options)
    source = _locate(name, SHAPES, dtype=dtype)
    hub = _hub_options(source, revision, SHAPES) | {"trust_remote_code": trust_remote_code}
    with _explained(name):
        config = _in_dtype(AutoConfig.from_pretrained(source.place, **hub), dtype)
        return _outline(config, trust_remote_code, options)


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
    require_dtype(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _require_attention(name: str) -> None:
    """Refuse what transformers has not registered; a kernel of the hub has an owner."""
    if "/" not in name and "|" not in name:
        known = ("eager", *(each for each in ALL_ATTENTION_FUNCTIONS if "|" not in each))
        require_choice("attn_implementation", name, tuple(sorted(known)))


def _not_found(got: str, expected: str = _ANY) -> ModelNotFoundError:
    return not_found(got, expected)


def _locate(name: str, also: Iterable[str] = (), *, dtype: str = "auto") -> _Source:
    """Tell the demo model, GGUF files, folders and hub ids apart, without asking a network.

    `also` are names that work as well, for a suggestion. GGUF files are converted to the dtype.
    """
    path = local_place(name, _known(also))
    if path is not None and path.is_dir():
        return _Source(place=str(path))
    if path is not None:
        wanted = "float32" if name == DEMO else "bfloat16" if dtype == "auto" else dtype
        folder, sha256 = convert_once(path, getattr(torch, wanted))
        return _Source(place=str(folder), revision=f"sha256:{sha256}")
    if name.strip("/").count("/") == 1 or name in _WITHOUT_OWNER or _is_cached(name, None):
        return _Source(place=name, on_hub=True)
    hint = nearest(name, _known(also))
    if (shape := shape_of(name)) is not None:
        hint = f"; the weights of that shape are in {SHAPES[shape].repository}"
    got = f"{name!r}, which is not one of them{hint}"
    raise _not_found(got, f"{_ANY} such as Qwen/Qwen3-4B")


def _hub_options(source: _Source, revision: str | None, also: Iterable[str] = ()) -> dict[str, Any]:
    """What to tell `from_pretrained` about the hub, which is not asked in vain."""
    name, options = source.place, {"revision": revision}
    if revision and not source.on_hub:
        raise InvalidArgumentError(
            f"revision: expected it with a hub id, got {revision!r} with files of this machine, "
            "which have no revisions; leave it out"
        )
    if not source.on_hub or _is_reachable(name, revision):
        return options
    if not _is_cached(name, revision):
        why = f"{constants.ENDPOINT} did not answer within {_TIMEOUT_SECONDS} seconds"
        if constants.HF_HUB_OFFLINE:
            why = "this process is offline (HF_HUB_OFFLINE)"
        raise _not_found(
            f"{name!r}: it is not in the hub's cache on this machine, and {why}"
            f"{nearest(name, _known(also)) or '; pass the folder of a model that is here'}"
        )
    return options | {"local_files_only": True}


def _is_cached(name: str, revision: str | None) -> bool:
    """Whether a model's configuration is in the hub's cache on this machine."""
    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:
        return False


def _is_reachable(name: str, revision: str | None) -> bool:
    """Whether the hub answers within seconds, not after the client's retries; never if offline."""
    if constants.HF_HUB_OFFLINE:
        return False
    url = hf_hub_url(name, "config.json", revision=revision)
    try:
        get_hf_file_metadata(url, timeout=_TIMEOUT_SECONDS)
    except HfHubHTTPError:
        return True  # that there is no such model, or that it may not be read, is an answer
    except Exception:  # whichever errors the HTTP client of this release has
        return False
    return True


def place_of(name: str) -> str:
    """The folder or hub id behind a name, for other loaders; a GGUF file is converted first."""
    return _locate(name).place


def _known(also: Iterable[str] = ()) -> Iterator[str]:
    """Names that would have worked: the demo, models in this folder and in the hub's cache."""
    yield from known_names()
    yield from also
    with contextlib.suppress(CacheNotFound):
        yield from (repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")


def _outline(config: Any, trust_remote_code: bool, options: Mapping[str, Any]) -> Any:
    """The model without its weights, once the cache has judged that it can be compressed.

    Without options it is in the dtype of the checkpoint.
    """
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"model: expected a decoder-only model, got the encoder-decoder {config.model_type}; "
            "its prompt is read by the encoder and is not in a key-value cache"
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
        raise _not_found(
            f"{name!r}: {first_line(error).rstrip('.')}{nearest(name, _known())}"
        ) from error
    except (ImportError, ValueError, KeyError) as error:
        kind = MissingDependencyError if isinstance(error, ImportError) else UnsupportedModelError
        raise kind(
            f"model: expected a causal language model that transformers can load here, got "
            f"{name!r}: {first_line(error)}"
        ) from error
