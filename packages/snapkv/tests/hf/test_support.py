"""What does not go together is refused in one line, and nothing has changed: every row."""

import pytest

from snapkv import CompressedCache, SnapKVError
from snapkv.hf.support import RULES, Setup
from snapkv.policies import (
    H2O,
    AdaKV,
    ExpectedAttention,
    FastGen,
    KVzap,
    KVzip,
    PyramidKV,
    SnapKV,
)
from snapkv.prefill import selective
from snapkv.storage.bits import KVCodes
from tests.families import call, random_ids, small_model
from tests.gates import drawn_gate

SNAPKV = SnapKV(24, window_size=8)
LINE = r"^\w+: expected .* got .*; "
PER_QUERY_HEAD = SnapKV(24, window_size=8, group_reduce="none")


def dropping(model, cache):
    cache.drop([(0, 2)])


def drafting(model, cache):
    cache.activate_past_recording()


def in_part(model, cache):
    with selective(model):
        model(random_ids(1, 60), past_key_values=cache)


MADE = [
    ("llama", SNAPKV, {"recall": "host", "turns": "append"}, "turns: expected 'compress' with"),
    ("llama", SNAPKV, {"recall_bytes": 10}, "recall_bytes: expected recall='host'"),
    ("llama", FastGen(), {}, "with_tokenizer"),
    ("llama", AdaKV(SNAPKV), {"storage": "static"}, "storage: expected a policy"),
    ("llama", SnapKV(keep_ratio=0.5), {"storage": "static"}, "storage: expected a policy"),
    ("llama", PyramidKV(24, window_size=8), {"storage": "static"}, "storage: expected a policy"),
    ("llama", H2O(64), {"storage": "static"}, "storage: expected a policy"),
    ("llama", PER_QUERY_HEAD, {"storage": "static"}, "storage: expected a policy"),
    ("sliding", SNAPKV, {"storage": "static"}, "DynamicSlidingWindowLayer"),
    ("llama", SNAPKV, {"storage": "static", "turns": "compress"}, "storage: expected 'dynamic'"),
    ("llama", H2O(64), {"quantize": "int8"}, "quantize: expected a policy"),
    ("llama", PyramidKV("50%", window_size=8), {"quantize": KVCodes(exact_layers=1)}, "quantize"),
    ("latent", SNAPKV, {"quantize": "int8"}, "none for latent attention"),
    ("latent", PER_QUERY_HEAD, {}, "'mean' for latent attention"),
    ("linear latent", PER_QUERY_HEAD, {}, "'mean' for latent attention"),
    ("llama", H2O(64), {"turns": "compress"}, "for turns='compress', got h2o"),
    ("llama", H2O(64), {"recall": "host"}, "only compresses prompts for recall"),
    ("llama", KVzip(64), {"recall": "host"}, "has been read once"),
    ("llama", ExpectedAttention(64), {"recall": "host"}, "by the last queries or none"),
    ("llama", AdaKV(ExpectedAttention(64)), {"recall": "host"}, "by the last queries or none"),
    ("llama", AdaKV(SNAPKV), {"turns": "compress"}, "the same for all heads and layers"),
    (
        "llama",
        KVzap(64, gate=drawn_gate()),
        {"turns": "compress"},
        "the same for all heads and layers",
    ),
]


@pytest.mark.parametrize(("kind", "policy", "options", "said"), MADE)
def test_what_does_not_go_together_is_refused_when_the_cache_is_made(kind, policy, options, said):
    model = small_model(kind)
    before = model.config._attn_implementation
    with pytest.raises(SnapKVError, match=LINE) as refused:
        CompressedCache(model, policy, **options)
    assert said in str(refused.value)
    assert model.config._attn_implementation == before


def drop(model, cache):
    cache.drop([(0, 2)])


def verify_drafts(model, cache):
    cache.activate_past_recording()


def read_in_part(model, cache):
    with selective(model):
        call(model, cache, random_ids(1, 60, 1) % 60 + 3)


LATER = [
    (drop, "llama", H2O(64), {}, "policy: expected one that only compresses prompts for drop"),
    (drop, "llama", SNAPKV, {"storage": "static"}, "storage: expected 'dynamic' for drop"),
    (drop, "llama", ExpectedAttention(64), {}, "where tokens stand for drop"),
    (verify_drafts, "linear", SNAPKV, {}, "got recurrent states"),
    (verify_drafts, "llama", H2O(64), {}, "where drafts are verified"),
    (read_in_part, "sliding", SNAPKV, {}, "layer_by_layer"),
    (read_in_part, "llama", SNAPKV, {"recall": "host"}, "recall: expected none"),
    (read_in_part, "llama", SNAPKV, {"storage": "static"}, "storage: expected none"),
    (read_in_part, "llama", ExpectedAttention(64), {}, "by attention alone"),
]


@pytest.mark.parametrize(("ask", "kind", "policy", "options", "said"), LATER)
def test_what_a_cache_cannot_do_is_refused_before_anything_changes(
    ask, kind, policy, options, said
):
    model = small_model(kind)
    cache = CompressedCache(model, policy, **options)
    if ask is drop:
        call(model, cache, random_ids(1, 60) % 60 + 3)
    before = cache.report()
    with pytest.raises(SnapKVError, match=LINE) as refused:
        ask(model, cache)
    assert said in str(refused.value)
    assert cache.report() == before


def test_every_row_of_the_table_is_tried():
    found = set()
    for kind, policy, options, _ in [*MADE, *(row[1:] for row in LATER)]:
        try:
            setup = CompressedCache(small_model(kind), policy, **options).setup
        except SnapKVError as error:
            found.add(str(error).split(", got ")[0])
            continue
        found |= {
            rule.line.format(s=setup).split(", got ")[0] for rule in RULES if rule.meets(setup)
        }
    expected = [rule.line.split(", got ")[0] for rule in RULES]
    missing = [line for line in expected if not any(_alike(line, each) for each in found)]
    assert not missing


def _alike(line, said):
    """Whether a row's line was said, what stands in braces left out."""
    return all(part in said for part in line.replace("}", "{").split("{")[::2])


def test_a_setup_alone_goes_with_everything():
    for use in ("made", "drop", "drafts", "selective"):
        Setup(policy=SNAPKV).require(use)
