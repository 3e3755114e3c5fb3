"""Names of kvpress (0.5.5) and of the methods' own code, and what to write instead.

The page about them is docs/migrating.md.
"""

from collections.abc import Sequence
from typing import Any

from snapkv.errors import InvalidTypeError, SnapKVError, wrong
from snapkv.validation import closest, plain_number

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


_PATCHES = (
    "replace_llama",
    "replace_mistral",
    "replace_mixtral",
    "init_snapkv",
    "SnapKVCluster",
    "update_kv",
    "monkeypatch",
)
"""Names of the authors' package, which is also imported as `snapkv`."""

_ARGUMENTS = {
    "max_capacity_prompt": "budget",
    "max_capacity_prompts": "budget",
    "max_cache_len": "budget",
    "cache_size": "budget",
    "kv_budget": "budget",
    "max_tokens": "budget",
    "window": "window_size",
    "observation_window": "window_size",
    "recent_window": "window_size",
    "kernel": "kernel_size",
    "n_sink": "sink_tokens",
    "num_sink_tokens": "sink_tokens",
    "n_future_positions": "future_tokens",
    "alpha_safeguard": "safeguard",
    "first_stage_ratio": "first_share",
    "heavy_budget": "heavy",
    "hh_size": "heavy",
    "recent_size": "recent",
    "recent_budget": "recent",
    "start_size": "start",
    "divide_length": "evict_every",
}
"""Arguments of other code, and the argument with the same meaning here."""


def is_kvpress_name(name: str) -> bool:
    """Return whether `name` is a class of kvpress, as every name is that ends with "Press"."""
    return name.endswith("Press") or name in _INSTEAD


_MOVED = {name: f"snapkv_app.{name}" for name in ("cli", "inspector", "library", "plan")}
_MOVED |= {"app": "snapkv_app", "Library": "snapkv_app.Library"}
"""Names that this package had until 0.3.0, and where they are now."""


def advice_for(name: str) -> str | None:
    """Return what to write instead of a name that this package does not have.

    Returns:
        One or two sentences without a full stop at the end. None if `name` is neither a name of
        kvpress nor of the authors' code, and has not moved to another package.
    """
    if is_kvpress_name(name):
        return f"{name} is a name from kvpress and not from snapkv. {instead_of(name)}"
    if name in _PATCHES:
        return (
            f"{name} is a name of the authors' code, and this package patches no class. Write "
            "model.generate(**inputs, past_key_values=CompressedCache(model)), see "
            "docs/migrating.md"
        )
    if name in _MOVED:
        return (
            f"{name} is in the package snapkv-app since 0.4.0. Install it with pip install "
            f"'snapkv[app]', and import {_MOVED[name]}"
        )
    return None


def unknown_argument(method: str, name: str, value: Any, known: Sequence[str]) -> SnapKVError:
    """Build the error for an argument that a method does not have.

    Args:
        method: the name of the method's class.
        name: the argument.
        value: its value, for the example in the remedy.
        known: the arguments that the method has.

    Returns:
        An InvalidTypeError for the caller to raise; nothing is raised here.
    """
    if name == "compression_ratio":
        problem = "expected either keep_ratio, which is the fraction of tokens to keep, or budget"
        return wrong(name, problem, instead_of(f"{method}Press", value), InvalidTypeError)
    problem = f"the method {method} has no such argument, only {', '.join(known) or 'none'}"
    remedy = _instead_of_argument(method, name, value, known)
    return wrong(name, problem, remedy, InvalidTypeError)


def _instead_of_argument(method: str, name: str, value: Any, known: Sequence[str]) -> str:
    """Return the remedy for an argument that a method does not have.

    It is one sentence without a full stop: the name that this package gives the argument, the most
    similar argument of the method, or "Leave it out".

    Args:
        method: the name of the method's class.
        name: the argument that the user passed.
        value: its value.
        known: the arguments that the method has.
    """
    if (own := _ARGUMENTS.get(name)) in known:
        return f"Write {own}={value!r}, see docs/migrating.md"
    if name == "keep_ratio" and "budget" in known:
        return "Use the argument budget, which is the number of tokens to keep of every prompt"
    if {"policy", "prompt"} & set(known) and name in ("budget", "keep_ratio", own):
        return f"Pass it to the method inside, as in {method}({_inside(known, own or name, value)})"
    close = closest(name, known)
    return f"Use {close} instead" if close else "Remove this argument"


def _inside(known: Sequence[str], name: str, value: Any) -> str:
    own = f"SnapKV({name}={value!r})"
    return own if "policy" in known else f"prompt={own}"


def instead_of(name: str, compression_ratio: Any = 0.75) -> str:
    """Return a sentence that says what to write instead of a class of kvpress.

    Args:
        name: a class of kvpress. For an unknown one, the sentence only names the page.
        compression_ratio: the fraction that kvpress removes, for the example; 0.75 is used in place
            of anything that is not a number between 0 and 1.

    Returns:
        The sentence without a full stop.
    """
    compression_ratio = plain_number(compression_ratio)
    is_ratio = isinstance(compression_ratio, int | float) and 0 < compression_ratio < 1
    ratio = compression_ratio if is_ratio else 0.75
    page = "see docs/migrating.md"
    if name in _INSTEAD:
        return f"Write {_INSTEAD[name].format(keep=f'{1 - ratio:.3g}')}, {page}"
    found = _OTHERS.get(name)
    if found is None:
        return page.capitalize()
    reason = found.removeprefix("no: ")
    return f"Use {found}, {page}" if reason == found else f"There is none: {reason}, {page}"
