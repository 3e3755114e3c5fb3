"""Every unsupported combination of options raises a one-line error and changes nothing."""

import re

import pytest

from snapkv import (
    CompressedCache,
    InvalidArgumentError,
    InvalidTypeError,
    SnapKV,
    SnapKVError,
    UnsupportedModelError,
)
from snapkv.hf.support import RULES
from snapkv.policies import (
    AdaKV,
    ExpectedAttention,
    FastGen,
    KVzap,
    KVzip,
    PyramidKV,
    Random,
    StreamingLLM,
)
from tests.families import call, random_ids, small_model, tiny_config, tiny_model
from tests.gates import drawn_gate
from tests.methods import BOTH, METHODS, OWN_BUDGET, SNAPKV

LINE = r"^\w+: .*\. [A-Z].*\.$"
RATIO, BYTES = METHODS["snapkv by ratio"], SnapKV("12%")
HOST, COMPRESS = {"recall": "host"}, {"turns": "compress"}
EVICTS = METHODS["h2o"]

REFUSED = [
    # Recall.
    ("turns: this argument must be 'recall'", SNAPKV, HOST | {"turns": "append"}),
    ("turns: this argument must be 'recall'", SNAPKV, HOST | COMPRESS),
    ("turns: expected one of append, compress, recall", SNAPKV, HOST | {"turns": "forget"}),
    ("recall_bytes: .* together with recall='host' or a folder", SNAPKV, {"recall_bytes": 5}),
    ("recall_bytes: expected a value of at least 1", SNAPKV, HOST | {"recall_bytes": 0}),
    ("recall: files cannot be written to the folder", SNAPKV, {"recall": "/proc/nowhere"}),
    ("recall: .* the folder .*embedded null.* Use 'host'", SNAPKV, {"recall": "a\0b"}),
    ("policy: .* can only be used with a policy that only compresses prompts", EVICTS, HOST),
    ("policy: .*queries of earlier turns are not stored", ExpectedAttention(**BOTH), HOST),
    ("policy: .*queries of earlier turns are not stored", AdaKV(ExpectedAttention(**BOTH)), HOST),
    ("later turns are read once", KVzip(**BOTH), HOST),
    ("later turns are read once", AdaKV(KVzip(**BOTH)), HOST),
    # Turns that are compressed.
    ("a policy with the same budget for all heads", AdaKV(SNAPKV), COMPRESS),
    ("a policy with the same budget for all heads", RATIO, COMPRESS),
    ("the same budget for all heads and layers", PyramidKV(**BOTH), COMPRESS),
    ("which do not need the queries of earlier turns", ExpectedAttention(**BOTH), COMPRESS),
    ("does not need positions", KVzap(64, gate=drawn_gate()), COMPRESS),
    ("recall='host'", OWN_BUDGET, COMPRESS),
    (r"policy: .*share=0\.12", BYTES, COMPRESS),
    # Few bits.
    *(
        (
            f"quantize: the value must be int8, int4, K8V4 .*, but got '{gone}'",
            SNAPKV,
            {"quantize": gone},
        )
        for gone in ("int3", "int2", "fp8", "auto")
    ),
    ("quantize: .* with a policy that only", EVICTS, {"quantize": "int8"}),
    # Budgets of all layers.
    *(
        (f"{next(iter(options))}|policy", METHODS[name], options)
        for name, *given in (
            ("across-layers", COMPRESS),
            ("across-layers of kvzip", HOST, COMPRESS),
        )
        for options in given
    ),
    # Protected spans.
    ("positions='original'", StreamingLLM(40), {"protect": [(0, 1)]}),
]


@pytest.mark.parametrize(("said", "policy", "options"), REFUSED)
def test_incompatible_options_are_refused_with_remedy(said, policy, options):
    with pytest.raises(InvalidArgumentError, match=said) as refusal:
        CompressedCache(tiny_model("llama"), policy, **options)
    assert "\n" not in str(refusal.value)
    assert re.search(r"\. [A-Z].*\.$", str(refusal.value)), "no remedy"


@pytest.mark.parametrize("recall", ["cpu", "Host", "none"])
def test_recall_does_not_take_words_like_cpu_as_folder(recall, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InvalidArgumentError, match=f"got '{recall}'. Use 'host', or use './{recall}'"
    ):
        CompressedCache(tiny_model("llama"), SNAPKV, recall=recall)
    assert not list(tmp_path.iterdir())
    CompressedCache(tiny_model("llama"), SNAPKV, recall=f"./{recall}")


@pytest.mark.parametrize(
    ("said", "policy", "options"),
    [
        ("recall: expected 'host' or the path", SNAPKV, {"recall": 5}),
        ("recall: expected 'host' or the path", SNAPKV, {"recall": ""}),
        ("policy: expected a policy such as", "snapkv", {}),
        ("policy: expected a policy such as .*got the class Random. See", Random, {}),
        ("policy: .*got a LlamaConfig. See", tiny_config("llama"), {}),
    ],
)
def test_wrong_type_of_policy_or_recall_is_refused(said, policy, options):
    with pytest.raises(InvalidTypeError, match=said) as refusal:
        CompressedCache(tiny_model("llama"), policy, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "policy", [ExpectedAttention(**BOTH), KVzap(16, window_size=4, gate=drawn_gate(4, 8))]
)
def test_methods_that_rotate_keys_refuse_latent_attention(policy):
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        CompressedCache(tiny_model("deepseek_v3"), policy)


PER_QUERY_HEAD = METHODS["snapkv by query head"]
MODELS = [
    ("llama", FastGen(), {}, "with_tokenizer"),
    ("latent", SNAPKV, {"quantize": "int8"}, "latent attention), which cannot be quantized"),
    ("latent", PER_QUERY_HEAD, {}, "'mean' for latent attention"),
    ("linear latent", PER_QUERY_HEAD, {}, "'mean' for latent attention"),
]


@pytest.mark.parametrize(("kind", "policy", "options", "said"), MODELS)
def test_options_that_model_does_not_support_leave_model_unchanged(kind, policy, options, said):
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


LATER = [
    (
        drop,
        "llama",
        EVICTS,
        {},
        "policy: spans can only be dropped with a policy that only compresses prompts",
    ),
    (
        drop,
        "llama",
        ExpectedAttention(**BOTH),
        {},
        "spans can only be dropped with a policy that does not need positions",
    ),
    (verify_drafts, "linear", SNAPKV, {}, "rejected drafts cannot be removed"),
    (
        verify_drafts,
        "llama",
        EVICTS,
        {},
        "drafts (of Medusa, an assistant model or prompt lookup) only work with",
    ),
]


@pytest.mark.parametrize(("ask", "kind", "policy", "options", "said"), LATER)
def test_unsupported_cache_operation_is_refused_before_any_change(ask, kind, policy, options, said):
    model = small_model(kind)
    cache = CompressedCache(model, policy, **options)
    if ask is drop:
        call(model, cache, random_ids(1, 60) % 60 + 3)
    before = cache.report()
    with pytest.raises(SnapKVError, match=LINE) as refused:
        ask(model, cache)
    assert said in str(refused.value)
    assert cache.report() == before


def test_every_compatibility_rule_is_tested():
    found = set()
    made = [("llama", policy, options) for _, policy, options in REFUSED]
    models, later = [row[:3] for row in MODELS], [row[1:4] for row in LATER]
    for kind, policy, options in made + models + later:
        try:
            setup = CompressedCache(small_model(kind), policy, **options).setup
        except SnapKVError as error:
            found.add(str(error))
            continue
        found |= {rule.problem.format(s=setup) for rule in RULES if rule.meets(setup)}
    missing = [
        rule.problem
        for rule in RULES
        if not any(_is_instance(rule.problem, message) for message in found)
    ]
    assert not missing


def _is_instance(problem, message):
    """Return whether a message contains all parts of a problem outside its braces."""
    return all(part in message for part in problem.replace("}", "{").split("{")[::2])
