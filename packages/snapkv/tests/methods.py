"""Every method once and in its variants, small enough for prompts of 90 tokens."""

from snapkv.policies import (
    H2O,
    RKV,
    TOVA,
    AcrossLayers,
    AdaKV,
    AutoBudget,
    CriticalKV,
    EvictingPolicy,
    ExpectedAttention,
    FastGen,
    FullCache,
    KeyDiff,
    KVzap,
    KVzip,
    LagKV,
    PromptThenDecode,
    PyramidKV,
    Random,
    Scissorhands,
    SnapKV,
    StreamingLLM,
)
from tests.gates import drawn_gate

BOTH = {"budget": 40, "window_size": 8}
SNAPKV = SnapKV(**BOTH, kernel_size=5)
OWN_BUDGET = SnapKV(budget=AutoBudget(lost_vote=0.05, least=4), window_size=8)

METHODS = {
    "snapkv": SNAPKV,
    "snapkv by query head": SnapKV(group_reduce="none", **BOTH),
    "snapkv fading": SnapKV(pooling="fading", **BOTH),
    "snapkv by the largest": SnapKV(
        pooling="fading", window_reduce="max", group_reduce="max", **BOTH
    ),
    "snapkv, more voters": SnapKV(voters=20, **BOTH),
    "snapkv by ratio": SnapKV(keep_ratio=0.4, window_size=8),
    "snapkv by itself": OWN_BUDGET,
    "adakv by itself": AdaKV(OWN_BUDGET),
    "pyramidkv": PyramidKV(beta=2, **BOTH),
    "adakv": AdaKV(SNAPKV),
    "adakv by ratio": AdaKV(SnapKV(keep_ratio=0.4, window_size=8)),
    "adakv of expected-attention": AdaKV(ExpectedAttention(**BOTH)),
    "criticalkv": CriticalKV(SNAPKV),
    "adakv of criticalkv": AdaKV(CriticalKV(SNAPKV)),
    "expected-attention": ExpectedAttention(**BOTH),
    "full": FullCache(),
    "h2o": H2O(budget=40),
    "streaming-llm": StreamingLLM(budget=40, positions="original"),
    "streaming-llm moved": StreamingLLM(budget=40),
    "tova": TOVA(budget=40),
    "scissorhands": Scissorhands(budget=40, recent=4, drop=6, history=16),
    "scissorhands by slots": Scissorhands(40, history=6, recent=8, drop=3, threshold="slots"),
    "r-kv": RKV(budget=40, evict_every=3),
    "fastgen": FastGen(
        0.2, local_ratio=0.1, frequent_ratio=0.1, special_ids=(1,), punctuation_ids=(5, 9)
    ),
    "prompt-then-decode": PromptThenDecode(prompt=SNAPKV, decode=TOVA(budget=42)),
    "snapkv, then h2o": PromptThenDecode(prompt=SNAPKV, decode=H2O(budget=42)),
    "keydiff": KeyDiff(**BOTH),
    "lagkv": LagKV(**BOTH, lag_size=8),
    "random": Random(**BOTH),
    "kvzip": KVzip(**BOTH),
    "kvzap": KVzap(**BOTH, gate=drawn_gate()),
    "across-layers": AcrossLayers(SNAPKV),
    "across-layers by itself": AcrossLayers(OWN_BUDGET),
    "across-layers of kvzap": AcrossLayers(KVzap(**BOTH, gate=drawn_gate())),
    "across-layers of kvzip": AcrossLayers(KVzip(**BOTH)),
}

COMPRESSING = [name for name, made in METHODS.items() if not isinstance(made, EvictingPolicy)]
"""Those that only compress prompts."""

STORED = {
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "compress": {"turns": "compress"},
    "recall": {"recall": "host"},
}
"""Every way to store and to go on that is not the default."""

CACHES = {
    **{name: (policy, {}) for name, policy in METHODS.items() if not policy.reads_context},
    **{name: (SNAPKV, options) for name, options in STORED.items()},
}
"""A method and options of a cache: every method as it is, and SnapKV in every way to store."""
