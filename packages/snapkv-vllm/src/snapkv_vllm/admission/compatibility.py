"""What does not go together: a server's settings, vLLM's configuration, what one request asks for.

One table, asked in one place. No vLLM is needed here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from snapkv.errors import UnsupportedModelError
from snapkv.policies import RKV, TOVA, AcrossLayers, AdaKV
from snapkv_vllm.admission.names import DECODE_BUDGET, PREFIX, SESSION, SPANS, printable, wrong
from snapkv_vllm.layouts import FP8

_PLAIN = ("auto", "float16", "bfloat16", "float32")
MOVABLE = (*_PLAIN, *FP8)
"""Formats of a KV cache whose tokens can be moved."""


class Parts(TypedDict, total=False):
    """Where arguments are looked for, as far as it is known."""

    settings: Any  # the server's `ServingSettings`
    engine: Any  # vLLM's configuration
    given: Mapping[Any, Any]  # a request's `extra_args`
    body: Mapping[str, Any]  # its JSON body
    called: Mapping[str, str]  # what its client calls some of these settings
    request: Any  # what the scheduler makes of it


_Look = Callable[[Any], object]
"""What there is of a fact in one part, to be shown; nothing where it is falsy."""


@dataclass(frozen=True)
class Case:
    """Something that an option cannot be combined with."""

    part: str  # where to look for it, one of `Parts`
    words: str
    found: _Look
    option: str = ""  # of the command line or the body that set it


@dataclass(frozen=True)
class Option:
    """An option that may be refused."""

    part: str  # where to look for it, one of `Parts`
    name: str  # "": what is found is its name
    found: _Look
    expected: str = "none"


@dataclass(frozen=True)
class Row:
    """An option, what it cannot be combined with, why (if not obvious), and what to do.

    By default, one of the two must be left out.
    """

    option: Option
    case: Case
    why: str = ""
    remedy: str = ""

    @property
    def parts(self) -> set[str]:
        return {self.option.part, self.case.part}

    def refuse(self, parts: Mapping[str, Any]) -> None:
        """Raise if both are given, see `require_compatible`."""
        option, case = self.option, self.case
        if not case.found(parts[case.part]) or not (got := option.found(parts[option.part])):
            return
        because = f", since {self.why}" if self.why else ""
        name, shows = (option.name, got) if option.name else (printable(str(got)), "one")
        name = parts.get("called", {}).get(name, name)
        leave = " or ".join(filter(None, (_typed(option.part, name), case.option)))
        remedy = self.remedy or f"leave {leave} out"
        error = wrong(name, f"{option.expected} {case.words}{because}", shows, remedy)
        is_engine = "engine" in self.parts and "request" not in self.parts
        raise UnsupportedModelError(str(error)) if is_engine else error


def _typed(part: str, name: str) -> str:
    """An option as the user typed it; "" if the user cannot leave it out."""
    if name in ("model", "prompt"):
        return ""
    return name if part in ("given", "request") else f"--{name.replace('_', '-')}"


def require_compatible(**parts: Unpack[Parts]) -> None:
    """Refuse what does not go together.

    Raises:
        UnsupportedModelError: an engine that cannot serve with these settings.
        InvalidArgumentError: settings, or a request, that ask for two things at once.
    """
    for row in ROWS:
        if row.parts <= parts.keys():
            row.refuse(dict(parts))


# Of vLLM's configuration.


def _drafts(config: Any) -> object:
    return config.speculative_config and config.speculative_config.method


def _graphs_of_prompts(config: Any) -> object:
    from vllm.config.compilation import CUDAGraphMode

    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL and mode.name


def _too_parallel(config: Any) -> object:
    processes = config.parallel_config.tensor_parallel_size
    heads = config.model_config.get_total_num_kv_heads()
    return processes > heads and f"{processes} processes for {heads}"


def _of_model(attribute: str, words: str, argument: str = "model") -> Option:
    return Option("engine", argument, lambda c: getattr(c.model_config, attribute) and words)


def _several(argument: str, attribute: str = "") -> Option:
    """Processes of a kind; not every vLLM has every kind."""

    def found(config: Any) -> object:
        count = getattr(config.parallel_config, attribute or argument, 1)
        return count > 1 and count

    return Option("engine", argument, found)


def _other_format(names: tuple[str, ...]) -> Option:
    def found(config: Any) -> object:
        given = config.cache_config.cache_dtype
        return given not in names and given

    return Option("engine", "kv_cache_dtype", found, f"one of {', '.join(names)}")


def _is(argument: str, value: str, look: _Look) -> Option:
    return Option("engine", argument, lambda c: look(c) == value and value)


DRAFTS = Option("engine", "speculative_config", _drafts)
MODEL_DRAFTS = Option(
    "engine",
    "speculative_config",
    lambda c: (method := _drafts(c)) != "ngram" and method,
    'no method but "ngram"',
)
DECODE_CONTEXTS = _several("decode_context_parallel_size")
CONTEXTS = _several("prefill_context_parallel_size")
TENSOR, PIPELINE = _several("tensor_parallel_size"), _several("pipeline_parallel_size")
TOO_PARALLEL = Option("engine", "tensor_parallel_size", _too_parallel, "a KV head for each process")
MICRO_BATCHES = Option("engine", "enable_dbo", lambda c: c.parallel_config.use_ubatching and "it")
CONNECTOR = Option("engine", "kv_transfer_config", lambda c: c.kv_transfer_config and "a connector")
LATENT = _of_model("use_mla", "one with latent attention (MLA)")
DIMENSIONS = _of_model("uses_mrope", "one with positions in several dimensions (M-RoPE)")
NO_ATTENTION = _of_model("is_attention_free", "one without attention")
ENCODER = _of_model("is_encoder_decoder", "an encoder-decoder")
POOLING = _is("model", "pooling", lambda c: c.model_config.runner_type)
SLEEP = _of_model("enable_sleep_mode", "it", "enable_sleep_mode")
NOT_MOVABLE, NOT_PLAIN = _other_format(MOVABLE), _other_format(_PLAIN)
GRAPHS = Option("engine", "cudagraph_mode", _graphs_of_prompts, "none of whole prompt steps")

WITH_LATENTS = Case("engine", "with latent attention (MLA)", LATENT.found)
IN_PARALLEL = Case("engine", "in several processes", TENSOR.found)
WITH_DIMENSIONS = Case("engine", "where positions have several dimensions", DIMENSIONS.found)

# Of a server's settings.


def _evicts_by(method: str) -> _Look:
    return lambda s: s.limits.decode_budget and s.limits.decode_policy == method


def _method(*names: str) -> _Look:
    return lambda s: s.policy in names and s.policy


HELD = Option("settings", DECODE_BUDGET, lambda s: s.limits.decode_budget)
UNEVEN = Option(
    "settings",
    "policy",
    _method(AdaKV.name, AcrossLayers.name),
    "one whose heads keep the same number of tokens",
)

ALWAYS = Case("settings", "where prompts are compressed", lambda s: True)
WHERE_HELD = Case("settings", "where answers are held to a budget", HELD.found, "--decode-budget")
HELD_BY_RKV = Case("settings", "where answers are held by r-kv", _evicts_by(RKV.name))
HELD_BY_TOVA = Case("settings", "where answers are held by tova", _evicts_by(TOVA.name))
BY_TOVA = Case("settings", "with tova", lambda s: s.policy == TOVA.name, "--policy tova")
WHERE_UNEVEN = Case("settings", "where heads differ in length", UNEVEN.found, "--policy")
BY_ACROSS = Case(
    "settings", "with across-layers", _method(AcrossLayers.name), "--policy across-layers"
)
SESSIONS = Case("settings", "where sessions are held", lambda s: s.sessions, "--sessions")
NO_SESSIONS = Case("settings", "on a server that holds no sessions", lambda s: not s.sessions)

# Of requests.


def _first_own(given: Mapping[Any, Any]) -> object:
    own = (name for name in given if isinstance(name, str) and name.startswith(PREFIX))
    return next(own, None)


IN_SESSION = Option(
    "given", PREFIX + SESSION, lambda g: g.get(PREFIX + SESSION) is not None and "one"
)
SPANS_NAMED = Option("given", PREFIX + SPANS, lambda g: PREFIX + SPANS in g and "some")
ANYTHING = Option("given", "", _first_own)
IMAGES = Option("request", "prompt", lambda r: r.mm_features and "images", "text alone")
GROWING = Option(
    "request", "prompt", lambda r: getattr(r, "resumable", False) and "a session's", "a whole one"
)

WITH_SPANS = Case("given", f"with {PREFIX}{SPANS}", SPANS_NAMED.found)
WITH_BEAMS = Case(
    "body", "with use_beam_search", lambda b: b.get("use_beam_search"), "use_beam_search"
)

# The table.

STOCK = "serve the model with stock vLLM"
_SNAPKV = "use --policy snapkv"
_AVERAGES = "it averages over heads of other processes"
_GOES_ON = "the prompt of a session goes on after its end"
_UNTESTED = "the two were never tested together"

_TABLE: dict[Case, tuple[tuple[Option, *tuple[str, ...]], ...]] = {
    ALWAYS: (
        (MODEL_DRAFTS, "a model that drafts has a cache of its own, in which no window votes"),
        (DECODE_CONTEXTS, "a prompt's blocks are spread over processes"),
        (CONTEXTS, "a prompt's queries are spread over processes"),
        (MICRO_BATCHES, "queries that vote are looked up in the whole batch"),
        (CONNECTOR, "what a compressed request holds is no prefix that another server could load"),
        (NO_ATTENTION, "its state has no positions to drop", STOCK),
        (ENCODER, "its prompt is not in the cache of the decoder", STOCK),
        (POOLING, "it generates nothing from its cache", STOCK),
        (NOT_MOVABLE, "others have more than one scale for a layer"),
        (GRAPHS, "queries are put aside between graphs", "set it to FULL_AND_PIECEWISE"),
        (TOO_PARALLEL, "copies of a head would keep different tokens", "use fewer of them"),
    ),
    IN_PARALLEL: ((LATENT, "all heads vote on one latent", "use data parallelism"),),
    WITH_LATENTS: ((NOT_PLAIN, _UNTESTED),),
    WHERE_HELD: (
        (DRAFTS, "a rejected draft would have counted"),
        (SPANS_NAMED, "tokens of them may be gone by then"),
        (GROWING, _GOES_ON, "send whole requests, or start the server without --decode-budget"),
    ),
    HELD_BY_RKV: ((LATENT, "no latents can be compared as keys", "pass --decode-policy tova"),),
    HELD_BY_TOVA: ((TENSOR, _AVERAGES, "pass --decode-policy r-kv"),),
    BY_TOVA: ((TENSOR, _AVERAGES, _SNAPKV),),
    WHERE_UNEVEN: (
        (HELD, "its heads hold different numbers of tokens"),
        (LATENT, "all heads of a layer keep one set, so there is nothing to share out", _SNAPKV),
    ),
    BY_ACROSS: tuple(
        (several, "a process has a part of the heads that share a budget", "use --policy adakv")
        for several in (TENSOR, PIPELINE)
    ),
    SESSIONS: (
        (HELD, "histories say at which token they begin"),
        (UNEVEN, "a later prompt goes on from what all of them hold"),
        (SLEEP, "an engine that sleeps forgets its cache"),
        *((untested, _UNTESTED) for untested in (DIMENSIONS, DRAFTS, LATENT, PIPELINE)),
    ),
    NO_SESSIONS: ((IN_SESSION, "", "leave it out, or start the server with --sessions"),),
    WITH_DIMENSIONS: ((IMAGES, "none was ever compressed so", f"send it with {PREFIX}budget 0"),),
    WITH_SPANS: ((GROWING, _GOES_ON, "send it as a request of its own"),),
    WITH_BEAMS: ((ANYTHING, "requests of a beam carry no settings inside vLLM"),),
}
ROWS = tuple(Row(row[0], case, *row[1:]) for case, rows in _TABLE.items() for row in rows)
"""Every argument with what it does not go with."""
