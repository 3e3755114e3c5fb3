"""With what documents cannot be kept in a folder; asked of vLLM's configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapkv.policies import AdaKV
from snapkv_vllm.settings import ServingSettings

Rule = tuple[str, Callable[[Any], Any], str]
"""What is in the way, whether it is there, and why that is so and what to do."""

_WEIGHTS = "their files say which weights have read them, by those in the model's folder; leave "


def _kept(vllm_config: Any, policy: str | None = None) -> bool:
    """Whether a server keeps documents in a folder, and serves this policy if one is given."""
    settings = ServingSettings.from_config(vllm_config.additional_config)
    kept = settings.sharing is not None and bool(settings.sharing.folder)
    return kept and policy in (None, settings.policy)


IN_A_FOLDER: tuple[Rule, ...] = (
    (
        "documents in a folder and adakv",
        lambda c: _kept(c, AdaKV.name),
        "heads of a layer hold different numbers of tokens, which no engine takes from a file; "
        "serve with --policy snapkv, or leave --share-folder out",
    ),
    (
        "documents in a folder and tensor or pipeline parallelism",
        lambda c: _kept(c) and c.parallel_config.world_size > 1,
        "each process has a part of every document; leave --share-folder out",
    ),
    (
        "documents in a folder and workers on Ray",
        lambda c: _kept(c) and c.parallel_config.distributed_executor_backend == "ray",
        "they may run where the folder is not; leave --share-folder out",
    ),
    (
        "documents in a folder and quantised weights",
        lambda c: _kept(c) and c.model_config.quantization is not None,
        _WEIGHTS + "--quantization or --share-folder out",
    ),
    (
        "documents in a folder and a model that is changed (--hf-overrides)",
        lambda c: _kept(c) and bool(c.model_config.hf_overrides),
        _WEIGHTS + "--hf-overrides or --share-folder out",
    ),
    (
        "documents in a folder and made-up weights (--load-format dummy)",
        lambda c: _kept(c) and c.load_config.load_format == "dummy",
        _WEIGHTS + "--load-format or --share-folder out",
    ),
    (
        "documents in a folder and a model that is not in one",
        lambda c: _kept(c) and not Path(c.model_config.model).is_dir(),
        "their files say which weights have read them; pass the folder that the model was "
        "downloaded to, or leave --share-folder out",
    ),
)
