"""What does not go together is refused in one line, when the cache is made."""

import pytest

from snapkv import (
    CompressedCache,
    InvalidArgumentError,
    InvalidTypeError,
    KVCodes,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.policies import (
    AcrossLayers,
    AdaKV,
    ExpectedAttention,
    KVzap,
    KVzip,
    PyramidKV,
    Random,
    StreamingLLM,
)
from tests.families import tiny_model
from tests.gates import drawn_gate
from tests.methods import BOTH, METHODS, OWN_BUDGET, SNAPKV

RATIO, BYTES = METHODS["snapkv by ratio"], SnapKV("12%")
HOST, COMPRESS, STATIC = {"recall": "host"}, {"turns": "compress"}, {"storage": "static"}
FEW = {"quantize": KVCodes(exact_layers=1)}
EVICTS = METHODS["h2o"]

REFUSED = [
    # Recall.
    ("turns: expected 'compress' with recall", SNAPKV, HOST | {"turns": "append"}),
    ("turns: expected one of append, compress", SNAPKV, HOST | {"turns": "forget"}),
    ("recall_bytes: expected recall='host' or a folder", SNAPKV, {"recall_bytes": 5}),
    ("recall_bytes: expected at least 1", SNAPKV, HOST | {"recall_bytes": 0}),
    ("recall: expected 'host' or a folder", SNAPKV, {"recall": "/proc/nowhere"}),
    ("recall: expected 'host' or a folder.*null byte; choose", SNAPKV, {"recall": "a\0b"}),
    ("policy: expected one that only compresses", EVICTS, HOST),
    ("policy: expected one that chooses by the", ExpectedAttention(**BOTH), HOST),
    ("policy: expected one that chooses by the", AdaKV(ExpectedAttention(**BOTH)), HOST),
    ("later turns are read once", KVzip(**BOTH), HOST),
    ("later turns are read once", AdaKV(KVzip(**BOTH)), HOST),
    # Turns that are compressed.
    ("a budget that is the same for all heads", AdaKV(SNAPKV), COMPRESS),
    ("a budget that is the same for all heads", RATIO, COMPRESS),
    ("the same for all heads and layers", PyramidKV(**BOTH), COMPRESS),
    ("chooses by the last queries or none", ExpectedAttention(**BOTH), COMPRESS),
    ("does not ask where tokens stand", KVzap(64, gate=drawn_gate()), COMPRESS),
    ("storage: expected 'dynamic'", SNAPKV, COMPRESS | STATIC),
    ("recall='host'", OWN_BUDGET, COMPRESS),
    (r"expected .*share=0\.12", BYTES, COMPRESS),
    # Static storage.
    *(
        ("storage: expected a policy that keeps a budg", METHODS[name], STATIC)
        for name in ("full", "h2o", "snapkv by ratio", "adakv", "pyramidkv", "snapkv by query head")
    ),
    (r"expected .*share=0\.12", BYTES, STATIC),
    # Few bits.
    *(
        (f"quantize: expected int8 or int4, keys .*, got '{gone}'", SNAPKV, {"quantize": gone})
        for gone in ("int3", "int2", "fp8", "auto")
    ),
    ("quantize: expected a policy that only", EVICTS, {"quantize": "int8"}),
    ("quantize: expected layers that all hold tokens in", AdaKV(PyramidKV("50%")), FEW),
    ("where across-layers shares bytes out among", AcrossLayers(KVzip("30%")), FEW),
    # Budgets of all layers.
    *(
        (f"{next(iter(options))}|policy", METHODS["across-layers"], options)
        for options in (STATIC, HOST, COMPRESS)
    ),
    # Protected spans.
    ("positions='original'", StreamingLLM(40), {"protect": [(0, 1)]}),
]


@pytest.mark.parametrize(("said", "policy", "options"), REFUSED)
def test_what_does_not_go_together(said, policy, options):
    with pytest.raises(InvalidArgumentError, match=said) as refusal:
        CompressedCache(tiny_model("llama"), policy, **options)
    assert "\n" not in str(refusal.value)
    assert "; " in str(refusal.value)


@pytest.mark.parametrize(
    ("said", "policy", "options"),
    [
        ("recall: expected 'host' or the path", SNAPKV, {"recall": 5}),
        ("policy: expected a policy such as", "snapkv", {}),
        ("policy: expected a policy such as", Random, {}),
    ],
)
def test_what_is_none_of_them(said, policy, options):
    with pytest.raises(InvalidTypeError, match=said):
        CompressedCache(tiny_model("llama"), policy, **options)


@pytest.mark.parametrize(
    "policy", [ExpectedAttention(**BOTH), KVzap(16, window_size=4, gate=drawn_gate(4, 8))]
)
def test_methods_that_turn_keys_refuse_latents(policy):
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        CompressedCache(tiny_model("deepseek_v3"), policy)
