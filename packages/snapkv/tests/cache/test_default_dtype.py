"""Caches under `torch.set_default_dtype` and `torch.autocast`, as users load and call models."""

import pytest
import torch

from snapkv import AutoBudget, CompressedCache, default_policy
from snapkv.kvzip import read_twice
from tests.cache.rows import Rows
from tests.families import call, kept_of, random_ids, tiny_model
from tests.methods import METHODS
from tests.oracle import masked_decode_logits


@pytest.fixture
def bfloat16_by_default():
    """Calls a function under another default dtype."""
    before = torch.get_default_dtype()

    def call(function, *arguments):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return function(*arguments)
        finally:
            torch.set_default_dtype(before)

    return call


@torch.no_grad()
def kept(policy):
    """Return the positions that every layer keeps after a prompt and a few decode steps."""
    rows = Rows(policy, {}, [0, 0] if policy.needs_reconstruction_pass else [60, 0])
    if policy.needs_reconstruction_pass:
        read_twice(rows.model, random_ids(2, 300), rows.cache)
    else:
        rows.turn(random_ids(2, 300), 300, random_ids(2, 6, 1))
    return kept_of(rows.cache)


NAMES = (
    "snapkv fading", "adakv by ratio", "criticalkv", "expected-attention", "h2o", "scissorhands",
    "r-kv", "fastgen", "lagkv", "kvzip", "kvzap", "streaming-llm moved", "across-layers of kvzap",
)  # fmt: skip
CASES = {name: METHODS[name] for name in NAMES}
CASES["by itself"] = default_policy(AutoBudget(lost_vote=0.003))


@pytest.mark.parametrize("policy", CASES.values(), ids=CASES)
def test_default_dtype_does_not_change_the_kept_positions(policy, bfloat16_by_default):
    tiny_model("llama")  # made once, in float32
    assert bfloat16_by_default(kept, policy) == kept(policy)


@pytest.mark.parametrize("outside", [False, True], ids=["goes on", "goes on without"])
@pytest.mark.parametrize("method", ["snapkv", "adakv", "across-layers"])
def test_decode_after_a_prompt_under_autocast_equals_the_masked_oracle(method, outside):
    model, ids, tokens = tiny_model("llama"), random_ids(2, 90), random_ids(2, 3, 1)
    cache = CompressedCache(model, METHODS[method])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(model, cache, ids)
        expected = masked_decode_logits(model, cache, ids, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not outside):
        got = torch.cat([call(model, cache, token) for token in tokens.split(1, dim=1)], dim=1)
    torch.testing.assert_close(got.float(), expected.float(), atol=0.03, rtol=0.03)


CHOOSING = ["h2o", "r-kv", "fastgen", "criticalkv", "adakv of expected-attention", "across-layers"]


@pytest.mark.parametrize("method", CHOOSING)
def test_methods_select_without_autocast_and_without_gradients(method, monkeypatch):
    """No operation of a method runs in the dtype of autocast."""
    seen, policy = [], METHODS[method]
    for name in ("select", "evict", "score_layer"):
        if own := getattr(type(policy), name, None):

            def noting(*given, own=own, **named):
                seen.append(torch.is_autocast_enabled("cpu") or torch.is_grad_enabled())
                return own(*given, **named)

            monkeypatch.setattr(type(policy), name, noting)
    model, cache = tiny_model("llama"), CompressedCache(tiny_model("llama"), policy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for ids in (random_ids(1, 90), random_ids(1, 1, 1)):
            cache.expect_tokens(ids)
            call(model, cache, ids)
    assert seen
    assert not any(seen)
