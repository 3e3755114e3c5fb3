"""Find the sizes of a model by its name, without loading torch where that is possible."""

import contextlib
import json
from pathlib import Path
from typing import Any

from snapkv.errors import wrong
from snapkv_app.plan import Footprint, footprint_of
from snapkv_app.plan.footprint import MissingSettingError
from snapkv_app.plan.shapes import SHAPES, shape_of

_DEMO_SHAPE = "smollm2-135m"


def find_footprint(
    name: str,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Footprint:
    """Find the configuration of a model, and compute the footprint of the model from it.

    A published shape, a folder and a hub id that is in the hub's cache are read without torch and
    transformers. Both are loaded for a GGUF file, for a hub id that must be downloaded, and for a
    `config.json` that leaves out settings, for which transformers has defaults.

    Args:
        name: "demo", a published shape or its hub id, a ``.gguf`` file, a folder with a
            ``config.json``, or another hub id.
        dtype: the dtype in which weights and caches are counted. None for the checkpoint's own
            dtype, with quantized weights as they are stored; published shapes are in bfloat16.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run the configuration code that comes with the checkpoint.

    Raises:
        ModelNotFoundError: there is no file, folder or model on the hub with that name.
        InvalidArgumentError: `config.json` is damaged, `dtype` is not known, or `revision` is
            passed with something else than a hub id.
        UnsupportedModelError: the sizes of the model's family are not known, or the dtype of the
            checkpoint is not.
        MissingDependencyError: a package that the model needs is not installed.
    """
    shape = None if revision else _DEMO_SHAPE if name == "demo" else shape_of(name)
    if shape is not None:
        return SHAPES[shape].footprint(dtype or ("float32" if name == "demo" else None))

    from snapkv_app.model_places import config_file  # imports the hub's client

    file = None if trust_remote_code else config_file(name, revision)
    if file is not None:
        settings = _read(file)
        stored = None if "text_config" in settings else _checkpoint_bytes(file.parent)
        with contextlib.suppress(MissingSettingError):
            return footprint_of(settings, dtype=dtype, weights_bytes=stored)
    from snapkv_app.models import load_settings

    settings = load_settings(name, revision=revision, trust_remote_code=trust_remote_code)
    return footprint_of(settings, dtype=dtype)


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model.

    Raises:
        InvalidArgumentError: the file cannot be read, or does not contain a JSON object.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        found = error
    if not isinstance(found, dict):
        raise wrong(
            "model",
            f"expected a JSON object in {file}, but got "
            f"{found if isinstance(found, Exception) else type(found).__name__}",
            "Download the model again",
        )
    return found


def _checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the tensors that transformers loads from a folder.

    None if the folder has no safetensors files or their index has no total size.

    Raises:
        InvalidArgumentError: the index cannot be read, or is not a JSON object.
    """
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        found = (_read(index).get("metadata") or {}).get("total_size")
        return None if found is None else int(found)
    if not file.is_file():
        return None
    with file.open("rb") as opened:  # the header's length is in the first eight bytes
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
