"""Every compression method and its variants, with budgets for prompts of 90 tokens."""

from snapkv import policies as kv
from tests.gates import drawn_gate

BOTH = {"budget": 40, "window_size": 8}
SNAPKV = kv.SnapKV(**BOTH, kernel_size=5)
OWN_BUDGET = kv.SnapKV(budget=kv.AutoBudget(lost_vote=0.05, least=4), window_size=8)

METHODS = {
    "snapkv": SNAPKV,
    "snapkv by query head": kv.SnapKV(group_reduce="none", **BOTH),
    "snapkv fading": kv.SnapKV(pooling="fading", **BOTH),
    "snapkv by the largest": kv.SnapKV(
        pooling="fading", window_reduce="max", group_reduce="max", **BOTH
    ),
    "snapkv, more voters": kv.SnapKV(voters=20, **BOTH),
    "snapkv by ratio": kv.SnapKV(keep_ratio=0.4, window_size=8),
    "snapkv by itself": OWN_BUDGET,
    "adakv by itself": kv.AdaKV(OWN_BUDGET),
    "pyramidkv": kv.PyramidKV(beta=2, **BOTH),
    "adakv": kv.AdaKV(SNAPKV),
    "adakv by ratio": kv.AdaKV(kv.SnapKV(keep_ratio=0.4, window_size=8)),
    "adakv of expected-attention": kv.AdaKV(kv.ExpectedAttention(**BOTH)),
    "criticalkv": kv.CriticalKV(SNAPKV),
    "adakv of criticalkv": kv.AdaKV(kv.CriticalKV(SNAPKV)),
    "expected-attention": kv.ExpectedAttention(**BOTH),
    "full": kv.FullCache(),
    "h2o": kv.H2O(budget=40),
    "streaming-llm": kv.StreamingLLM(budget=40, positions="original"),
    "streaming-llm moved": kv.StreamingLLM(budget=40),
    "tova": kv.TOVA(budget=40),
    "scissorhands": kv.Scissorhands(budget=40, recent=4, drop=6, history=16),
    "scissorhands by slots": kv.Scissorhands(40, history=6, recent=8, drop=3, threshold="slots"),
    "r-kv": kv.RKV(budget=40, evict_every=3),
    "fastgen": kv.FastGen(
        0.2, local_ratio=0.1, frequent_ratio=0.1, special_ids=(1,), punctuation_ids=(5, 9)
    ),
    "prompt-then-decode": kv.PromptThenDecode(prompt=SNAPKV, decode=kv.TOVA(budget=42)),
    "snapkv, then h2o": kv.PromptThenDecode(prompt=SNAPKV, decode=kv.H2O(budget=42)),
    "keydiff": kv.KeyDiff(**BOTH),
    "lagkv": kv.LagKV(**BOTH, lag_size=8),
    "random": kv.Random(**BOTH),
    "kvzip": kv.KVzip(**BOTH),
    "kvzap": kv.KVzap(**BOTH, gate=drawn_gate()),
    "across-layers": kv.AcrossLayers(SNAPKV),
    "across-layers by itself": kv.AcrossLayers(OWN_BUDGET),
    "across-layers of kvzap": kv.AcrossLayers(kv.KVzap(**BOTH, gate=drawn_gate())),
    "across-layers of kvzip": kv.AcrossLayers(kv.KVzip(**BOTH)),
}

STORED = {
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "compress": {"turns": "compress"},
    "recall": {"recall": "host"},
}
"""Every way to store and to go on that is not the default."""

CACHES = {
    **{
        name: (policy, {})
        for name, policy in METHODS.items()
        if not policy.needs_reconstruction_pass
    },
    **{name: (SNAPKV, options) for name, options in STORED.items()},
}
"""A method and options of a cache: every method as it is, and SnapKV in every way to store."""
