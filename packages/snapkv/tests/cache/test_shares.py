"""A budget as a share of a short prompt still keeps at least the window and the sinks."""

from dataclasses import replace

import pytest
import torch

from snapkv.kvzip import read_twice
from tests.cache.rows import Rows
from tests.families import random_ids
from tests.methods import METHODS

SHARES = {"bytes": {"budget": "12%", "keep_ratio": None}, "ratio": {"keep_ratio": 0.12}}
LENGTHS = 1, 9, 13, 300


def innermost(policy):
    return innermost(policy.policy) if hasattr(policy, "policy") else policy


def with_share(policy, share):
    if hasattr(policy, "policy"):
        return replace(policy, policy=with_share(policy.policy, share))
    return replace(policy, **{"budget": None, **share})


ONE_OF_EACH = (
    "snapkv", "snapkv fading", "snapkv by query head", "pyramidkv", "adakv", "adakv of criticalkv",
    "expected-attention", "lagkv", "kvzip", "across-layers", "across-layers of kvzap",
)  # fmt: skip


@torch.no_grad()
def read(policy, lengths, options):
    tokens = max(lengths)
    rows = Rows(policy, options, [tokens - own for own in lengths])
    if policy.needs_reconstruction_pass:
        read_twice(rows.model, random_ids(1, tokens), rows.cache)
    else:
        rows.read(random_ids(len(lengths), tokens))
    return rows.cache


@pytest.mark.parametrize(
    ("name", "share", "options"),
    [
        *((name, "bytes", {}) for name in ONE_OF_EACH),
        *((name, "ratio", {}) for name in ("snapkv", "adakv", "across-layers")),
        *((name, "bytes", {"quantize": "int8"}) for name in ("snapkv", "adakv", "pyramidkv")),
    ],
)
def test_share_of_any_prompt_keeps_at_least_its_window_and_sinks(name, share, options):
    policy = with_share(METHODS[name], SHARES[share])
    window, sinks = innermost(policy).window_size, innermost(policy).sink_tokens
    batches = [[tokens] for tokens in LENGTHS]
    if not policy.needs_reconstruction_pass:
        batches.append([12, 300, 150])
    for lengths in batches:
        cache = read(policy, lengths, options)
        for layer in cache.compressed_layers:
            for own, heads in zip(lengths, cache.kept_positions(layer), strict=True):
                stays = {*range(min(sinks, own)), *range(max(0, own - window), own)}
                for head in heads.tolist():
                    assert stays <= {*head}, (lengths, layer)
    assert cache.report().kept_tokens < sum(lengths) / len(lengths)
