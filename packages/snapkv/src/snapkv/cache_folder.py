"""The folder for files that the package has made and can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder that holds converted models and the results of studies of models.

    It is $SNAPKV_CACHE_DIR if this is set, otherwise $XDG_CACHE_HOME/snapkv or ~/.cache/snapkv.
    """
    if folder := os.environ.get("SNAPKV_CACHE_DIR"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "snapkv"
