"""The methods, one file each; a new method is a file here and a name in `POLICIES`."""

from snapkv.policies.across_layers import AcrossLayers
from snapkv.policies.adakv import AdaKV
from snapkv.policies.base import EvictingPolicy, Policy
from snapkv.policies.budget import AutoBudget, ByteBudget
from snapkv.policies.criticalkv import CriticalKV
from snapkv.policies.default import default_policy
from snapkv.policies.expected_attention import ExpectedAttention
from snapkv.policies.fastgen import FastGen
from snapkv.policies.full import FullCache
from snapkv.policies.h2o import H2O
from snapkv.policies.keydiff import KeyDiff
from snapkv.policies.kvzap import KVzap
from snapkv.policies.kvzip import KVzip
from snapkv.policies.lagkv import LagKV
from snapkv.policies.prefix_policy import PrefixPolicy
from snapkv.policies.prompt_then_decode import PromptThenDecode
from snapkv.policies.pyramidkv import PyramidKV
from snapkv.policies.random import Random
from snapkv.policies.rkv import RKV
from snapkv.policies.scissorhands import Scissorhands
from snapkv.policies.snapkv import SnapKV
from snapkv.policies.states import DecodeStep, Eviction, PromptLayer, Selection
from snapkv.policies.streaming_llm import StreamingLLM
from snapkv.policies.tova import TOVA

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        SnapKV,
        PyramidKV,
        AdaKV,
        AcrossLayers,
        CriticalKV,
        ExpectedAttention,
        FullCache,
        H2O,
        StreamingLLM,
        TOVA,
        Scissorhands,
        RKV,
        FastGen,
        PromptThenDecode,
        KeyDiff,
        LagKV,
        KVzip,
        KVzap,
        Random,
    )
}
"""Every method by its name on the command line."""

__all__ = [
    "AcrossLayers",
    "AdaKV",
    "AutoBudget",
    "ByteBudget",
    "CriticalKV",
    "DecodeStep",
    "EvictingPolicy",
    "Eviction",
    "ExpectedAttention",
    "FastGen",
    "FullCache",
    "H2O",
    "KVzap",
    "KVzip",
    "KeyDiff",
    "LagKV",
    "POLICIES",
    "Policy",
    "PrefixPolicy",
    "PromptLayer",
    "PromptThenDecode",
    "PyramidKV",
    "RKV",
    "Random",
    "Scissorhands",
    "Selection",
    "SnapKV",
    "StreamingLLM",
    "TOVA",
    "default_policy",
]
