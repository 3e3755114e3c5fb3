"""Find out where a model's files are, from its name: a GGUF file, a folder or a hub id.

Importing this file loads no torch, so that a misspelt name is refused at once.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    scan_cache_dir,
    try_to_load_from_cache,
)
from huggingface_hub.errors import CacheNotFound, HfHubHTTPError, HFValidationError

from snapkv.errors import ModelNotFoundError, SnapKVError, wrong
from snapkv.validation import nearest
from snapkv_app.packages import DEMO, demo_file
from snapkv_app.plan.shapes import SHAPES, shape_of
from snapkv_app.text_files import link_fault, where_to_look

_ANY = f"{DEMO!r}, a .gguf file, a folder or a hub id"

_TIMEOUT_SECONDS = 5
"""The longest time that the hub may take to answer."""

_WITHOUT_OWNER = frozenset(
    ("ctrl", "distilgpt2", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl", "openai-gpt", "xlnet")
)
"""Causal language models from the time when a hub id needed no owner."""


@dataclass(frozen=True, kw_only=True)
class ModelPlace:
    """The place where `from_pretrained` finds the files of a model."""

    place: str  # a folder or a hub id
    revision: str | None = None  # for results; None if the loaded configuration contains it
    on_hub: bool = False


def not_found(got: str, remedy: str, expected: str = _ANY, argument: str = "model") -> SnapKVError:
    """Build the `ModelNotFoundError` for a name without a model; the caller must raise it.

    Args:
        got: what was passed instead.
        remedy: a sentence that says what to do, without a full stop.
        expected: what `argument` may be.
        argument: the name of the argument.
    """
    return wrong(argument, f"expected {expected}, but got {got}", remedy, ModelNotFoundError)


def local_place(name: str, also: Iterable[str] = (), *, argument: str = "model") -> Path | None:
    """Return the GGUF file or the folder with that name, without using the network.

    Args:
        name: "demo", a file, a folder or a hub id.
        also: further names that an error may suggest.
        argument: the argument's name, for errors.

    Returns:
        The path; None for a hub id. Whether the hub has a model with that id is not checked.

    Raises:
        ModelNotFoundError: the name is empty, is the path of a missing file, of a file that is not
            GGUF or of a folder without a `config.json`, or cannot be a hub id.
        MissingDependencyError: the demo model is not installed.
    """
    if not name.strip():
        raise not_found("an empty name", f"For example, use {DEMO}", argument=argument)
    path = demo_file() if name == DEMO else Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            remedy = "Use the folder that contains the config.json of the model"
            expected = "a .gguf file, a folder or a hub id"
            raise not_found(f"the file {name}", remedy, expected, argument)
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            remedy = "Use a folder that was written by save_pretrained"
            raise not_found(f"{name} without one", remedy, "a folder with a config.json", argument)
        return path
    fault, is_path = link_fault(path), name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if fault or is_path or path.suffix == ".gguf":
        remedy = nearest(name, known_names(also), where_to_look(path))
        raise not_found(f"{name!r}{fault}", remedy, "an existing file or folder", argument)
    if name.strip("/").count("/") == 1 or name in _WITHOUT_OWNER or _is_cached(name, None):
        return None
    remedy = nearest(name, known_names(also), "Check the spelling of the name")
    if (shape := shape_of(name)) is not None:
        remedy = f"The weights of a model with this shape are in {SHAPES[shape].repository}"
    raise not_found(f"{name!r}", remedy, f"{_ANY} such as Qwen/Qwen3-4B", argument)


def locate(name: str, also: Iterable[str] = (), *, dtype: str = "auto") -> ModelPlace:
    """Return the place from which `from_pretrained` can load a model.

    The demo model and GGUF files are converted into a folder the first time. Whether the hub has a
    model is not checked.

    Args:
        name: "demo", a GGUF file, a folder or a hub id.
        also: further names that an error may suggest.
        dtype: the dtype of converted weights; "auto" is float32 for the demo model and bfloat16 for
            other GGUF files.

    Raises:
        ModelNotFoundError: as for `local_place`.
        InvalidArgumentError: a GGUF file cannot be converted.
        MissingDependencyError: the demo model, or a package that reads GGUF files, is not
            installed.
    """
    path = local_place(name, also)
    if path is None:
        return ModelPlace(place=name, on_hub=True)
    if path.is_dir():
        return ModelPlace(place=str(path))
    import torch  # not needed for other names

    from snapkv_app.conversion import convert_once

    wanted = "float32" if name == DEMO else "bfloat16" if dtype == "auto" else dtype
    folder, sha256 = convert_once(path, getattr(torch, wanted))
    return ModelPlace(place=str(folder), revision=f"sha256:{sha256}")


def hub_options(
    source: ModelPlace, revision: str | None, also: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the options with which `from_pretrained` loads a model from the hub or its cache.

    Args:
        source: the place of the model; the options for a folder have no effect.
        revision: a branch, tag or commit.
        also: further names that an error may suggest.

    Returns:
        "revision"; and "local_files_only" if the hub does not answer, so that the model is loaded
        from the hub's cache.

    Raises:
        InvalidArgumentError: `revision` is passed for a model that is not on the hub.
        ModelNotFoundError: the model is not in the hub's cache, and the hub does not answer or this
            process is offline. If the hub answers that there is no such model, nothing is raised.
    """
    name, options = source.place, {"revision": revision}
    if revision and not source.on_hub:
        raise wrong(
            "revision",
            f"only models from the hub have revisions, but got {revision!r} with files on this "
            "machine",
            "Remove this option",
        )
    if not source.on_hub or _is_reachable(name, revision):
        return options
    if not _is_cached(name, revision):
        why = f"{constants.ENDPOINT} did not answer within {_TIMEOUT_SECONDS} seconds"
        if constants.HF_HUB_OFFLINE:
            why = "this process is offline (HF_HUB_OFFLINE)"
        remedy = "Use the folder of a model on this machine"
        raise not_found(
            f"{name!r}, which is not in the cache of the hub on this machine, and {why}",
            nearest(name, known_names(also), remedy),
        )
    return options | {"local_files_only": True}


def _is_cached(name: str, revision: str | None) -> bool:
    """Return whether a model's configuration is in the hub's cache on this machine.

    False for a name that cannot be a hub id. None for `revision` means the branch main.
    """
    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:
        return False


def _is_reachable(name: str, revision: str | None) -> bool:
    """Return whether the hub answers within `_TIMEOUT_SECONDS`; always False if offline.

    That there is no such model, or that it may not be read, is an answer, too.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    url = hf_hub_url(name, "config.json", revision=revision)
    try:
        get_hf_file_metadata(url, timeout=_TIMEOUT_SECONDS)
    except HfHubHTTPError:
        return True
    except Exception:  # whichever errors the HTTP client of this release has
        return False
    return True


def config_file(name: str, revision: str | None = None) -> Path | None:
    """Return the `config.json` of a model whose files are on this machine.

    "demo" is converted into a folder first, see `locate`.

    Returns:
        The file in a folder or in the hub's cache; None for a GGUF file, and for a model of the hub
        that must be downloaded.

    Raises:
        ModelNotFoundError: there is no file or folder with that name, or the model cannot be
            downloaded.
        InvalidArgumentError: `revision` is passed with something else than a hub id.
        MissingDependencyError: the demo model, or a package that reads its file, is not installed.
    """
    if Path(name).suffix.lower() == ".gguf" and Path(name).expanduser().is_file():
        return None
    source = locate(name, SHAPES)
    if not source.on_hub or not _is_cached(name, revision):
        hub_options(source, revision, SHAPES)
        return None if source.on_hub else Path(source.place, "config.json")
    return Path(str(try_to_load_from_cache(name, "config.json", revision=revision)))


def place_of(name: str) -> str:
    """Return the folder or the hub id from which a model can be loaded.

    A GGUF file is converted into a folder first. Whether the hub has a model is not checked.

    Raises:
        ModelNotFoundError: there is no file or folder with that name, and it cannot be a hub id.
        InvalidArgumentError: a GGUF file cannot be converted.
        MissingDependencyError: the demo model, or a package that reads GGUF files, is not
            installed.
    """
    return locate(name).place


def known_names(also: Iterable[str] = ()) -> Iterator[str]:
    """Yield the names that an error message may suggest for a model.

    They are the demo, the names in `also`, the models in the working directory, and those in the
    hub's cache on this machine.
    """
    yield DEMO
    yield from also
    yield from (str(path) for path in Path().glob("*.gguf"))
    yield from (str(path.parent) for path in Path().glob("*/config.json"))
    with contextlib.suppress(CacheNotFound):
        yield from (repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
