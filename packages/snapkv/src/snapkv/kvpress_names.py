"""kvpress's names (0.5.5) and what to write instead; the page about it is docs/migrating.md."""

from typing import Any

_INSTEAD = {
    "SnapKVPress": 'SnapKV(keep_ratio={keep}, window_size=64, kernel_size=5, pooling="avg")',
    "PyramidKVPress": (
        'PyramidKV(keep_ratio={keep}, window_size=64, kernel_size=5, pooling="avg", beta=20)'
    ),
    "AdaKVPress": "AdaKV(SnapKV(keep_ratio={keep}), safeguard=0.2)",
    "CriticalKVPress": "CriticalKV(SnapKV(keep_ratio={keep}), first_share=0.5)",
    "CriticalAdaKVPress": "AdaKV(CriticalKV(SnapKV(keep_ratio={keep})))",
    "ExpectedAttentionPress": (
        "ExpectedAttention(keep_ratio={keep}, future_tokens=512, sink_tokens=4)"
    ),
    "KeyDiffPress": "KeyDiff(keep_ratio={keep})",
    "LagKVPress": "LagKV(keep_ratio={keep}, sink_tokens=4, lag_size=128)",
    "KVzipPress": (
        "read_context(model, ids, AcrossLayers(KVzip(keep_ratio={keep}, sink_tokens=4, plus=True)))"
    ),
    "ObservedAttentionPress": "H2O(128)",
    "StreamingLLMPress": 'StreamingLLM(128, start=4, positions="original")',
    "TOVAPress": "TOVA(128)",
    "RandomPress": "Random(keep_ratio={keep}, seed=0)",
    "PrefillDecodingPress": "PromptThenDecode(prompt=SnapKV(128), decode=TOVA(160))",
    "KVPressTextGenerationPipeline": (
        "model.generate(**inputs, past_key_values=CompressedCache(model, SnapKV()))"
    ),
}

_MERGED = "no: kept rows are exact copies"
_LEVERAGE = "no: KeyDiff is nearest"
_CHUNKS = "no: whole chunks; wide or fading pooling keeps runs"
_COMPOSED = "no: no common budget"
_TRAINED = "no: computed or trained in advance for each model"

_OTHERS = {
    "BasePress": "Policy",
    "ScorerPress": "PrefixPolicy",
    "BlockPress": "snapkv.prefill.layer_by_layer, which is exact",
    "ChunkPress": "a Library, which joins parts that were compressed one by one",
    "DecodingPress": "a method that evicts while generating, such as TOVA",
    "KVzapPress": "KVzap, with a gate that `snapkv study fit-gate` fits",
    "PerLayerCompressionPress": 'PyramidKV, or budget="auto"',
    "SimLayerKVPress": 'PyramidKV, or budget="auto"',
    "CAMPress": _MERGED,
    "MergingPress": _MERGED,
    "KVComposePress": _MERGED,
    "CapPress": _LEVERAGE,
    "CompactorPress": _LEVERAGE,
    "CURPress": _LEVERAGE,
    "LeverageScorePress": _LEVERAGE,
    "NonCausalAttnPress": _LEVERAGE,
    "ChunkKVPress": _CHUNKS,
    "EntropyGatedChunkKVPress": _CHUNKS,
    "ComposedPress": _COMPOSED,
    "CompressionRatioDecodingPress": _COMPOSED,
    "ExpectedAttentionStatsPress": _TRAINED,
    "FastKVzipPress": _TRAINED,
    "LUKVPress": _TRAINED,
    "QFilterPress": _TRAINED,
    "RestoreKVPress": _TRAINED,
    "DMSPress": 'no: trained evictors; with budget="auto" the votes choose how many stay',
    "DuoAttentionPress": "no: trained scores of heads; AdaKV divides by the votes",
    "FinchPress": "no: splits at a delimiter; Document keeps text and question apart",
    "KeyRerotationPress": "no: tokens stay at their positions; StreamingLLM moves its sinks",
    "KnormPress": "no: KeyDiff needs only keys, too",
    "KVgradPress": "no: needs a backward pass",
    "ThinKPress": "no: drops channels; quantize= shrinks them",
}


def is_kvpress_name(name: str) -> bool:
    return name.endswith("Press") or name in _INSTEAD


def instead_of(name: str, compression_ratio: Any = 0.75) -> str:
    """What to write for a name of kvpress, and the page that says more."""
    is_ratio = isinstance(compression_ratio, int | float) and 0 < compression_ratio < 1
    ratio = compression_ratio if is_ratio else 0.75
    page = "see docs/migrating.md"
    if name in _INSTEAD:
        return f"write {_INSTEAD[name].format(keep=f'{1 - ratio:.3g}')}; {page}"
    found = _OTHERS.get(name)
    if found is None:
        return page
    return f"there is {found}; {page}" if found.startswith("no:") else f"use {found}; {page}"
