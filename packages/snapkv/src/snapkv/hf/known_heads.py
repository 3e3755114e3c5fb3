"""Which heads of a model retrieve: what was found of it, from run to run.

`snapkv study heads` finds the scores; `DuoAttention` without a pattern goes by them. A file for
each model lies in the folder `head-scores` of `snapkv.cache_folder`; what was found of the demo
model comes with the package.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from snapkv.cache_folder import cache_folder
from snapkv.errors import InvalidArgumentError
from snapkv.hf.build import require_model
from snapkv.hf.identity import Remembered
from snapkv.policies import DuoAttention, Policy
from snapkv.policies.head_scores import HeadScores, head_scores


def known_head_scores(model: PreTrainedModel) -> HeadScores | None:
    """The scores of the KV heads of this model, in whatever dtype, if a study has found them."""
    return _KNOWN.of(model)


def remember_head_scores(
    model: PreTrainedModel, scores: HeadScores, measured: Mapping[str, Any] | None = None
) -> Path:
    """Keep the scores for later runs, in place of any; returns a file that is also a pattern.

    `scores` has a row for every layer of full attention, a number for each of its KV heads;
    `measured` says, as JSON for people, how they were found.
    """
    return _KNOWN.keep(model, head_scores("scores", scores), measured)


def with_known_heads(model: PreTrainedModel, policy: Policy) -> Policy:
    """The policy, with what was found of the model where it goes by that and was given nothing."""
    if not isinstance(policy, DuoAttention) or policy.pattern is not None:
        return policy
    require_model(model)
    scores = known_head_scores(model)
    if scores is None:
        name = getattr(model.config, "_name_or_path", "") or "MODEL"
        raise InvalidArgumentError(
            f"pattern: expected scores of the model's heads, got none, and none have been found "
            f"of it so far; run snapkv study heads --model {name}, or pass a file of scores"
        )
    return policy.with_scores(scores)


def head_scores_folder() -> Path:
    """Where the files are."""
    return cache_folder() / "head-scores"


def _read(found: Any, _: PreTrainedModel) -> HeadScores:
    """Whether they are as many as the model has heads is checked with those of users."""
    if not isinstance(found, list):  # the name of another file, say, which a user may give
        raise ValueError("it has no rows of scores")
    return head_scores("scores", found)


_KNOWN = Remembered(
    name="scores",
    study="heads",
    folder=lambda: head_scores_folder(),
    packaged=Path(__file__).with_name("head_scores"),
    read=_read,
    otherwise="nothing is known of its heads",
    log=logging.getLogger("snapkv.hf"),
)
