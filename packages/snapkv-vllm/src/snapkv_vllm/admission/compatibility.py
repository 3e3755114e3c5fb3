"""The combinations of settings, engine options and request fields that are refused.

All of them stand in the one table `ROWS`, which `require_compatible` checks. This module does not
import vLLM.
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
"""The formats of a KV cache whose tokens the plugin can move."""


class Parts(TypedDict, total=False):
    """The objects in which conflicts are looked for. A caller passes those that it knows at the
    time.
    """

    settings: Any  # the server's `ServingSettings`
    engine: Any  # vLLM's configuration
    extra_args: Mapping[Any, Any]  # of a request
    body: Mapping[str, Any]  # the JSON body of a request
    client_names: Mapping[str, str]  # the names under which the client has sent some settings
    request: Any  # vLLM's request, as the scheduler sees it


_Find = Callable[[Any], object]
"""Return what a part contains, as a noun phrase for the message, or something falsy."""


@dataclass(frozen=True)
class Case:
    """A condition under which some options are refused. It is one half of a `Row`."""

    part: str  # the key of `Parts` where `find` looks
    words: str
    find: _Find
    option: str = ""  # what set it on the command line or in the body, if it can be left out


@dataclass(frozen=True)
class Option:
    """An option that is refused in some cases. It is the other half of a `Row`."""

    part: str  # the key of `Parts` where `find` looks
    name: str  # "" if `find` returns the name of the option instead of its value
    find: _Find


@dataclass(frozen=True)
class Row:
    """One row of the table: an option, the case in which it is refused, the reason, and the remedy.
    A row without a reason gives none in its message.

    By default the remedy is to remove one of the two.
    """

    option: Option
    case: Case
    why: str = ""
    remedy: str = ""

    @property
    def parts(self) -> set[str]:
        """The keys of `Parts` in which the option and the case are looked up, one or two."""
        return {self.option.part, self.case.part}

    def refuse(self, parts: Mapping[str, Any]) -> None:
        """Check that `parts` does not contain both the option and the case of this row.

        Args:
            parts: the objects in which to look; it must have those that `Row.parts` names.

        Raises:
            UnsupportedModelError: both are there, and the row is about the configuration of the
                engine.
            RefusedError: both are there, and the row is about other settings, or about a request.
        """
        option, case = self.option, self.case
        if not case.find(parts[case.part]) or not (found := option.find(parts[option.part])):
            return
        name, value = (option.name, found) if option.name else (printable(str(found)), "a setting")
        name = parts.get("client_names", {}).get(name, name)
        because = f", because {self.why}" if self.why else ""
        removable = " or ".join(filter(None, (_typed(option.part, name), case.option)))
        remedy = self.remedy or f"Remove {removable}"
        error = wrong(name, f"{value} is not supported {case.words}{because}", remedy)
        is_engine = "engine" in self.parts and "request" not in self.parts
        raise UnsupportedModelError(str(error)) if is_engine else error


def _typed(part: str, name: str) -> str:
    """Return an option as users write it, or an empty text if it cannot be left out.

    Args:
        part: the key of `Parts` where the option was found.
        name: the name of the option.

    Returns:
        The name itself for a setting of a request, and the option of the command line for any
        other; empty for the model and the prompt.
    """
    if name in ("model", "prompt"):
        return ""
    return name if part in ("extra_args", "request") else f"--{name.replace('_', '-')}"


def require_compatible(**parts: Unpack[Parts]) -> None:
    """Check that no two of the given settings, options and fields conflict with each other. The
    first conflict in the order of `ROWS` is reported.

    Args:
        parts: the objects to look in, by the keys of `Parts`. Rows of the table that need another
            one are skipped.

    Raises:
        UnsupportedModelError: the engine cannot serve with these settings.
        RefusedError: the settings of the server, or those of a request, contradict each other, or
            the engine cannot serve this request.
    """
    for row in ROWS:
        if row.parts <= parts.keys():
            row.refuse(dict(parts))


# Options of vLLM's configuration.


def _drafting(config: Any) -> object:
    method = config.speculative_config and config.speculative_config.method
    return method and f"drafting with {method}"


def _graphs_of_prompts(config: Any) -> object:
    from vllm.config.compilation import CUDAGraphMode

    mode = config.compilation_config.cudagraph_mode
    is_full = mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL
    return is_full and f"the mode {mode.name}"


def _too_parallel(config: Any) -> object:
    processes = config.parallel_config.tensor_parallel_size
    heads = config.model_config.get_total_num_kv_heads()
    return processes > heads and f"a value of {processes} for {heads} KV heads"


def _of_model(attribute: str, words: str, argument: str = "model") -> Option:
    """Build an `Option` of the table of conflicts that is set if the model has a property.

    Args:
        attribute: the name of the property in vLLM's configuration of the model.
        words: the property as a noun phrase for the message.
        argument: the argument of vLLM that the message names.
    """
    return Option("engine", argument, lambda c: getattr(c.model_config, attribute) and words)


def _several(argument: str, attribute: str = "") -> Option:
    """Build an `Option` of the table of conflicts that is set if a number of processes is above 1.
    A version of vLLM without this number counts as 1.

    Args:
        argument: the name of vLLM's argument.
        attribute: the name of the number in vLLM's `parallel_config`; by default `argument`.
    """

    def find(config: Any) -> object:
        count = getattr(config.parallel_config, attribute or argument, 1)
        return count > 1 and f"a value of {count}"

    return Option("engine", argument, find)


def _other_format(names: tuple[str, ...]) -> Option:
    """Build an `Option` of the table of conflicts that is set if the KV cache has another format
    than those in `names`, which are vLLM's names of formats.
    """

    def find(config: Any) -> object:
        name = config.cache_config.cache_dtype
        return name not in names and f"the format {name}"

    return Option("engine", "kv_cache_dtype", find)


DRAFTS = Option("engine", "speculative_config", _drafting)
MODEL_DRAFTS = Option(
    "engine",
    "speculative_config",
    lambda c: (words := _drafting(c)) != "drafting with ngram" and words,
)
DECODE_CONTEXTS = _several("decode_context_parallel_size")
CONTEXTS = _several("prefill_context_parallel_size")
TENSOR, PIPELINE = _several("tensor_parallel_size"), _several("pipeline_parallel_size")
TOO_PARALLEL = Option("engine", "tensor_parallel_size", _too_parallel)
MICRO_BATCHES = Option("engine", "enable_dbo", lambda c: c.parallel_config.use_ubatching and "DBO")
CONNECTOR = Option("engine", "kv_transfer_config", lambda c: c.kv_transfer_config and "a connector")
LATENT = _of_model("use_mla", "a model with latent attention (MLA)")
DIMENSIONS = _of_model("uses_mrope", "a model with M-RoPE")
NO_ATTENTION = _of_model("is_attention_free", "a model without attention")
ENCODER = _of_model("is_encoder_decoder", "an encoder-decoder")
POOLING = Option("engine", "model", lambda c: c.model_config.runner_type == "pooling" and "pooling")
SLEEP = _of_model("enable_sleep_mode", "sleep mode", "enable_sleep_mode")
NOT_MOVABLE, NOT_PLAIN = _other_format(MOVABLE), _other_format(_PLAIN)
GRAPHS = Option("engine", "cudagraph_mode", _graphs_of_prompts)

WITH_LATENTS = Case("engine", "for a model with latent attention (MLA)", LATENT.find)
IN_PARALLEL = Case("engine", "with tensor parallelism", TENSOR.find)
WITH_DIMENSIONS = Case("engine", "for a model with M-RoPE", DIMENSIONS.find)

# Settings of the server.


def _evicts_with(method: str) -> _Find:
    return lambda s: s.limits.decode_budget and s.limits.decode_policy == method


def _uses(*names: str) -> _Find:
    return lambda s: s.policy in names and f"the method {s.policy}"


DECODE_LIMIT = Option("settings", DECODE_BUDGET, lambda s: s.limits.decode_budget)
PER_HEAD = Option("settings", "policy", _uses(AdaKV.name, AcrossLayers.name))

ALWAYS = Case("settings", "when prompts are compressed", lambda s: True)
WITH_LIMIT = Case("settings", "when answers have a budget", DECODE_LIMIT.find, "--decode-budget")
RKV_EVICTS = Case("settings", "when r-kv evicts from answers", _evicts_with(RKV.name))
TOVA_EVICTS = Case("settings", "when tova evicts from answers", _evicts_with(TOVA.name))
WITH_TOVA = Case("settings", "with the method tova", _uses(TOVA.name), "--policy tova")
WITH_RAGGED_HEADS = Case("settings", "when heads differ in length", PER_HEAD.find, "--policy")
WITH_ACROSS = Case(
    "settings", "with across-layers", _uses(AcrossLayers.name), "--policy across-layers"
)
WITH_SESSIONS = Case("settings", "on a server with sessions", lambda s: s.sessions, "--sessions")
WITHOUT_SESSIONS = Case("settings", "on a server without sessions", lambda s: not s.sessions)

# Fields and settings of requests.


def _first_own(extra_args: Mapping[Any, Any]) -> object:
    """Return the first name in the settings of a request that begins with "snapkv_", or None if
    there is none.
    """
    own = (name for name in extra_args if isinstance(name, str) and name.startswith(PREFIX))
    return next(own, None)


IN_SESSION = Option(
    "extra_args", PREFIX + SESSION, lambda g: g.get(PREFIX + SESSION) is not None and "a session"
)
NAMES_SPANS = Option("extra_args", PREFIX + SPANS, lambda g: PREFIX + SPANS in g and "a list")
ANY_SETTING = Option("extra_args", "", _first_own)
IMAGES = Option("request", "prompt", lambda r: r.mm_features and "a prompt with images")
STREAMING_INPUT = Option(
    "request", "prompt", lambda r: getattr(r, "resumable", False) and "streaming input"
)

WITH_SPANS = Case("extra_args", f"with {PREFIX}{SPANS}", NAMES_SPANS.find)
WITH_BEAMS = Case(
    "body", "with use_beam_search", lambda b: b.get("use_beam_search"), "use_beam_search"
)

# The table.

STOCK = "Serve the model with stock vLLM"
_SNAPKV = "Use --policy snapkv"
_AVERAGES = "it averages over heads of other processes"
_CONTINUES = "the prompt is continued after its end"
_UNTESTED = "the two were never tested together"

_TABLE: dict[Case, tuple[tuple[Option, *tuple[str, ...]], ...]] = {
    ALWAYS: (
        (MODEL_DRAFTS, "a draft model has its own cache, in which no observation window votes"),
        (DECODE_CONTEXTS, "the blocks of a prompt are spread over processes"),
        (CONTEXTS, "the queries of a prompt are spread over processes"),
        (MICRO_BATCHES, "the queries that vote are looked up in the whole batch"),
        (CONNECTOR, "the blocks of a compressed request are no prefix for another server"),
        (NO_ATTENTION, "its state has no positions to evict", STOCK),
        (ENCODER, "its prompt is not in the cache of the decoder", STOCK),
        (POOLING, "it generates nothing from its cache", STOCK),
        (NOT_MOVABLE, f"only {', '.join(MOVABLE)} have one scale for a layer or none"),
        (GRAPHS, "queries are recorded between graphs", "Set it to FULL_AND_PIECEWISE"),
        (TOO_PARALLEL, "copies of a head would keep different tokens", "Use fewer processes"),
    ),
    IN_PARALLEL: ((LATENT, "all heads vote on one latent", "Use data parallelism"),),
    WITH_LATENTS: ((NOT_PLAIN, _UNTESTED),),
    WITH_LIMIT: (
        (DRAFTS, "a rejected draft would have counted"),
        (NAMES_SPANS, "their tokens may have been evicted by then"),
        (STREAMING_INPUT, _CONTINUES, "Send whole requests, or remove --decode-budget"),
    ),
    RKV_EVICTS: ((LATENT, "latents cannot be compared as keys", "Pass --decode-policy tova"),),
    TOVA_EVICTS: ((TENSOR, _AVERAGES, "Pass --decode-policy r-kv"),),
    WITH_TOVA: ((TENSOR, _AVERAGES, _SNAPKV),),
    WITH_RAGGED_HEADS: (
        (DECODE_LIMIT, "an answer's budget is the same for all heads"),
        (LATENT, "all heads of a layer share one set of tokens", _SNAPKV),
    ),
    WITH_ACROSS: tuple(
        (several, "a process has only some of the heads that share a budget", "Use --policy adakv")
        for several in (TENSOR, PIPELINE)
    ),
    WITH_SESSIONS: (
        (DECODE_LIMIT, "a history must know how many tokens of the prompt it covers"),
        (PER_HEAD, "a later prompt continues from the same tokens in all heads"),
        (SLEEP, "an engine that sleeps loses its cache"),
        *((untested, _UNTESTED) for untested in (DIMENSIONS, DRAFTS, LATENT, PIPELINE)),
    ),
    WITHOUT_SESSIONS: ((IN_SESSION, "", "Remove it, or start the server with --sessions"),),
    WITH_DIMENSIONS: ((IMAGES, _UNTESTED, f"Send it with {PREFIX}budget 0"),),
    WITH_SPANS: ((STREAMING_INPUT, _CONTINUES, "Send it as one request"),),
    WITH_BEAMS: ((ANY_SETTING, "inside vLLM the requests of a beam have no settings"),),
}
ROWS = tuple(Row(row[0], case, *row[1:]) for case, rows in _TABLE.items() for row in rows)
"""Every refused combination, see `Row`."""
