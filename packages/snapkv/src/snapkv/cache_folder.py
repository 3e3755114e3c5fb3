"""Where the package keeps what it has made once and can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where converted models live, and what studies have found of models.

    $SNAPKV_CACHE_DIR, else $XDG_CACHE_HOME/snapkv, else ~/.cache/snapkv.
    """
    if folder := os.environ.get("SNAPKV_CACHE_DIR"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "snapkv"
