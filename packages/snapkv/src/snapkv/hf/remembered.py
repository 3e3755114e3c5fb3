"""What studies have found of a model, from run to run: a file for each model in a folder.

A file is named after what tells the model from others, in whatever dtype it was loaded.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedModel

from snapkv.cache.saving.writing import naming, replace_file
from snapkv.hf.identity import identity_of

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Remembered(Generic[Found]):
    """One kind of thing that is found of models.

    Attributes:
        name: of it in the files.
        study: which finds it.
        folder: where the files of this machine are, asked each time.
        packaged: where those are that come with the package.
        read: makes it out of what JSON gives, for a model; raises ValueError where that is no such
            thing.
        otherwise: what is done where nothing is known, for messages.
        log: of the part of the package that asks.
    """

    name: str
    study: str
    folder: Callable[[], Path]
    packaged: Path
    read: Callable[[Any, PreTrainedModel], Found] = field(repr=False)
    otherwise: str
    log: logging.Logger

    def of(self, model: PreTrainedModel) -> Found | None:
        """What was found of this model, or None.

        A file that cannot be read, or says something else, counts as none; `log` names
        it once, as a warning.
        """
        identity = identity_of(model, in_any_dtype=True)  # reads a little of every weight, so once
        path = self.folder() / _name_of(identity)
        if not path.exists():
            path = self.packaged / path.name
        try:
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict) or found.get("model") != identity:
                raise ValueError("it does not describe this model")
            return self.read(found.get(self.name), model)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            reason = str(getattr(error, "strerror", None) or error)
            _warn_once(self.log, path, reason, self.otherwise, self.study)
            return None

    def keep(
        self, model: PreTrainedModel, found: Any, measured: Mapping[str, Any] | None = None
    ) -> Path:
        """Keep what was found for later runs, in place of anything that is there.

        Args:
            model: which it was found of.
            found: as JSON.
            measured: how it was found, as JSON, for people who read the file.

        Returns:
            The file.

        Raises:
            OutputError: the file cannot be written; the one that was there still is.
        """
        identity = identity_of(model, in_any_dtype=True)
        path = self.folder() / _name_of(identity)
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        content = {self.name: found, "model": identity, "measured": dict(measured or {})}
        replace_file(path, json.dumps(content, indent=1) + "\n")
        return path


def _name_of(identity: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{digest[:32]}.json"


@functools.cache
def _warn_once(log: logging.Logger, path: Path, reason: str, otherwise: str, study: str) -> None:
    log.warning(
        "%s says nothing of the model (%s), so %s; remove it, or run snapkv study %s",
        path,
        reason,
        otherwise,
        study,
    )
