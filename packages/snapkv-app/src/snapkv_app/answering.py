"""Answer questions about a long prompt: generate, stream, measure times, report the cache."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteriaList, StopStringCriteria, TextStreamer

from snapkv.cache.report import CacheReport
from snapkv.errors import PromptTooLongError, wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.hf.device_memory import out_of_memory_explained
from snapkv.hf.placement import device_of
from snapkv.kvzip import read_for_policy, require_one_reading
from snapkv.policies import Policy
from snapkv.storage.bits import Quantize
from snapkv_app.draft_methods import DraftMethod
from snapkv_app.models import LoadedModel
from snapkv_app.plan.advice import prompt_memory_explained, token_costs
from snapkv_app.prefills import Exact, Prefill
from snapkv_app.prompt_end import PromptEndSink, telling_of_prompt_end
from snapkv_app.prompts import Prompt
from snapkv_app.protection import Protection
from snapkv_app.settings import GenerationSettings

TextSink = Callable[[str], None]
"""Called with the next piece of an answer."""

_HALF = "\ufffd"
"""The text that tokens decode to if the answer ends within a character."""

MOST_CHARACTERS_PER_TOKEN = 32
"""A text with more characters per position is refused after tokenizing its beginning."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and its costs; times start when the prompt is passed in."""

    text: str  # starts with the prompt's `answer_start`
    finish_reason: str  # "stop" if the model ended the answer, "length" if it was cut off
    policy: dict[str, Any]  # the method's name and its parameters
    prompt_tokens: int
    new_tokens: int  # an end-of-turn token included
    kept_tokens: float  # prompt tokens kept at the end, mean over heads and compressed layers
    first_token_ms: float  # prefill, compression, and one token
    token_ms: float | None  # per later token: median, or mean if some came together
    cache: CacheReport  # the cache's report when the answer was complete
    total_ms: float = 0.0
    protected: list[list[int]] = field(default_factory=list)  # half-open spans of positions
    drafts: dict[str, Any] | None = None  # costs of drafting, see `DraftMethod.tally`
    token_ids: tuple[int, ...] = ()

    def later(self, before_ms: float) -> "Answer":
        """Return a copy of the answer with `before_ms` added to `first_token_ms` and `total_ms`."""
        first, total = before_ms + self.first_token_ms, before_ms + self.total_ms
        return replace(self, first_token_ms=first, total_ms=total)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of an answer from a compressed cache with the answer of the full cache."""

    same: bool
    first_difference: int | None  # the index of the first different token; None without one

    @classmethod
    def of(cls, answer: Answer, full: Answer) -> Self:
        """Compare two complete answers.

        Equal texts count as the same, even if their tokens differ. If the texts differ, the tokens
        are compared.
        """
        if answer.text == full.text:
            return cls(same=True, first_difference=None)
        return cls.of_tokens(answer.token_ids, full.token_ids)

    @classmethod
    def of_tokens(cls, ours: Sequence[int], theirs: Sequence[int]) -> Self:
        """Compare two sequences of tokens.

        If one is longer, it differs at the place where the other has ended.
        """
        pairs = itertools.zip_longest(ours, theirs)
        place = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
        return cls(same=place is None, first_difference=place)

    @classmethod
    def of_first(cls, answer: Answer, full: Answer, tokens: int) -> Self:
        """Compare the first `tokens` tokens of two answers, whatever their texts are."""
        return cls.of_tokens(answer.token_ids[:tokens], full.token_ids[:tokens])


def answer(
    loaded: LoadedModel,
    prompt: Prompt,
    policy: Policy,
    settings: GenerationSettings,
    *,
    drafts: DraftMethod | None = None,
    protection: Protection | None = None,
    prefill: Prefill | None = None,
    quantize: Quantize | None = None,
    on_text: TextSink | None = None,
    on_prompt_end: PromptEndSink | None = None,
) -> Answer:
    """Read the prompt into a cache that the policy compresses, and generate the answer.

    Args:
        loaded: model and tokenizer.
        prompt: the text to continue.
        policy: selects the tokens to keep.
        settings: how the answer is generated.
        drafts: the source of drafts; None for none.
        protection: the tokens of the prompt that are always kept.
        prefill: how the prompt is read; None for exactly, in one pass.
        quantize: the format of stored keys and values: "int8", "int4", "K8V4" or a
            `KVCodes`; None for the dtype of the model.
        on_text: called with every finished piece of the answer, beginning with `answer_start`.
        on_prompt_end: called one time at the end of the prompt. It must be None if `drafts` is
            passed, which is not checked.

    Returns:
        The answer. Its text begins with `answer_start`, and ends before the first stop string.

    Raises:
        PromptTooLongError: prompt and answer need more positions than the model has.
        InvalidArgumentError: the policy cannot compress this prompt, or needs a hidden question and
            there is none; protected tokens do not occur in the prompt or do not fit into the
            budget; or the tokenizer turns ordinary words into control tokens.
        UnsupportedModelError: the model's cache cannot be compressed, the model cannot read prompts
            by `prefill`, or it has no gate for a policy that needs one.
        OutOfMemoryError: the device is full.
    """
    ids = prompt_ids(loaded, prompt, settings)
    policy = loaded.completed(policy)
    costs = functools.partial(token_costs, loaded.model, policy, quantize)
    spans = [] if protection is None else protection.spans(prompt, policy, loaded.tokenizer, costs)
    cache = _CountingCache(loaded.model, policy, protect=spans, quantize=quantize)
    cache.expect_question(prompt.question_tokens(loaded.tokenizer))
    found, _ = answer_ids(
        loaded,
        ids,
        cache,
        settings,
        answer_start=prompt.answer_start,
        context_tokens=prompt.context_tokens(loaded.tokenizer),
        drafts=drafts,
        prefill=prefill,
        on_text=on_text,
        on_prompt_end=on_prompt_end,
    )
    if drafts is None:
        return found
    return replace(found, drafts=drafts.tally(found.new_tokens, cache.passes))


def answer_ids(
    loaded: LoadedModel,
    ids: Tensor,
    cache: CompressedCache,
    settings: GenerationSettings,
    *,
    answer_start: str = "",
    on_text: TextSink | None = None,
    **how: Any,
) -> tuple[Answer, Tensor]:
    """Generate the answer after the tokens of a prompt, and measure its costs.

    Args:
        loaded: the model and its tokenizer.
        ids: (1, T) int64, the prompt.
        cache: an empty cache, or one that has read the beginning of `ids`; changed in place.
        settings: how the answer is generated.
        answer_start: the text at the end of the prompt that belongs to the answer.
        on_text: called with every finished piece of the answer, beginning with `answer_start`.
        how: further arguments of `continue_ids`.

    Returns:
        The answer, and (1, T + new) int64, the prompt and the generated tokens.

    Raises:
        InvalidArgumentError: the policy cannot compress this prompt, or needs a second pass over it
            although `context_tokens` is not passed.
        UnsupportedModelError: the model cannot read prompts by `prefill`.
        OutOfMemoryError: the device is full.
    """
    prompt_tokens = ids.shape[1]
    watch = _Stopwatch(loaded.tokenizer, on_text, settings.stop_strings, answer_start)
    output = continue_ids(loaded, ids, cache, settings, streamer=watch, **how)
    new_ids = output[0, prompt_tokens:].tolist()
    text = loaded.tokenizer.decode(new_ids, skip_special_tokens=True).rstrip(_HALF)
    before = _first_stop(text, settings.stop_strings)
    cut_off = len(new_ids) == settings.max_new_tokens and before is None
    ended = new_ids[-1] in end_token_ids(loaded.model, settings)
    found = Answer(
        text=answer_start + text[:before],
        finish_reason="length" if cut_off and not ended else "stop",
        policy=cache.prompt_state.policy.describe(),
        prompt_tokens=prompt_tokens,
        new_tokens=len(new_ids),
        kept_tokens=_stored_of(cache, prompt_tokens),
        first_token_ms=watch.first_token_ms,
        token_ms=watch.token_ms,
        total_ms=watch.total_ms,
        cache=cache.report(),
        token_ids=tuple(new_ids),
        protected=cache.options["protect"] or [],
    )
    return found, output


def _stored_of(cache: CompressedCache, tokens: int) -> float:
    """Return how many of the first `tokens` tokens a cache of one row stores.

    The result is the mean over all heads and compressed layers.
    """
    stored = [layer.stored_positions() for layer in cache.prompt_state.layers]
    return fmean(float(((at >= 0) & (at < tokens)).sum(-1).double().mean()) for at in stored)


def prompt_ids(loaded: LoadedModel, prompt: Prompt, settings: GenerationSettings) -> Tensor:
    """Tokenize a prompt, and return its tokens on the device of the model, (1, T) int64.

    If the text is far too long, only its beginning is tokenized before the error is raised.

    Raises:
        PromptTooLongError: prompt and answer need more positions than the model has.
        InvalidArgumentError: the tokenizer turns ordinary words of the text into control tokens.
    """
    if loaded.max_tokens is not None:
        most = MOST_CHARACTERS_PER_TOKEN * loaded.max_tokens
        if len(prompt.text) > most:
            begun, _ = prompt.encoded(loaded.tokenizer, end=most)
            require_positions(loaded, len(begun), settings, "more than ")
    ids: Tensor = prompt.token_ids(loaded.tokenizer).to(device_of(loaded.model))
    require_positions(loaded, ids.shape[1], settings)
    return ids


def require_positions(
    loaded: LoadedModel, prompt_tokens: int, settings: GenerationSettings, about: str = ""
) -> None:
    """Raise if a prompt leaves too few positions for the answer.

    A model without a limit of its positions accepts everything.

    Args:
        loaded: the model.
        prompt_tokens: the number of tokens of the prompt.
        settings: has the length of the answer.
        about: words to put before the number of tokens in the message.

    Raises:
        PromptTooLongError: prompt and answer need more positions than the model has.
    """
    max_tokens, new_tokens = loaded.max_tokens, settings.max_new_tokens
    if max_tokens is None or loaded.has_positions(prompt_tokens + new_tokens):
        return
    remedies = []
    if prompt_tokens < max_tokens:
        remedies.append(f"or lower max_new_tokens to at most {max_tokens - prompt_tokens:,}")
    if new_tokens < max_tokens:
        remedies.append(f"or shorten the prompt to at most {max_tokens - new_tokens:,} tokens")
    raise wrong(
        "prompt",
        f"the prompt of {about}{prompt_tokens:,} tokens and an answer of up to {new_tokens:,} do "
        f"not fit into the {max_tokens:,} positions of the model",
        ", ".join(["Choose a model with more positions", *remedies]),
        PromptTooLongError,
    )


def continue_ids(
    loaded: LoadedModel,
    ids: Tensor,
    cache: CompressedCache,
    settings: GenerationSettings,
    *,
    context_tokens: int | None = None,
    streamer: TextStreamer | None = None,
    drafts: DraftMethod | None = None,
    prefill: Prefill | None = None,
    on_prompt_end: PromptEndSink | None = None,
) -> Tensor:
    """Read a prompt into a cache, and generate the tokens after it.

    The random numbers begin with `settings.seed`; the state of torch's generators is restored
    afterwards. Whether prompt and answer fit into the positions of the model is not checked.

    Args:
        loaded: the model and its tokenizer.
        ids: (1, T) int64, the prompt, on the device of the model.
        cache: an empty cache, or one that has read the beginning of `ids`. Changed in place: it has
            read all tokens afterwards except the last generated one.
        settings: how tokens are generated.
        context_tokens: the cache is compressed after this many tokens, which needs an empty cache;
            None compresses it after the whole prompt. A policy that needs a second pass reads these
            tokens twice.
        streamer: receives the generated tokens.
        drafts: the method that drafts tokens; None drafts none.
        prefill: how new tokens are read; None reads them exactly, in one pass.
        on_prompt_end: called at the end of the prompt.

    Returns:
        (1, T + new) int64, the prompt and the generated tokens.

    Raises:
        InvalidArgumentError: the policy needs a second pass, `context_tokens` is None, and the
            cache is empty. Or the policy cannot compress this prompt.
        UnsupportedModelError: the model cannot read prompts by `prefill`.
        OutOfMemoryError: the device is full. The cache may then have read only a part.
    """
    model = loaded.model
    if context_tokens is None and not cache.get_seq_length():
        require_one_reading(cache.policy, "Hide the question from it (snapkv ask does)")
    reading = (prefill or Exact()).installed(model)
    telling = telling_of_prompt_end(model, cache, ids.shape[1], on_prompt_end)
    explained = prompt_memory_explained(model, ids.shape[1])
    with explained, _seeded(settings.seed, device_of(model)), reading:
        if context_tokens is not None:
            read_for_policy(model, loaded.tokenizer, ids[:, :context_tokens], cache)
            cache.expect_question(ids.shape[1] - context_tokens)
        with telling:
            output: Tensor = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **passed(cache),
                streamer=streamer,
                stopping_criteria=_stopping(loaded, settings),
                **generate_options(model, settings),
                **({} if drafts is None else drafts.options),
            )
    return output


def generate_options(model: Any, settings: GenerationSettings) -> dict[str, Any]:
    """Return the keyword arguments with which `model.generate` follows these settings.

    They override generation settings of the checkpoint: they request one sequence, without beams
    and with a cache, because nothing else can be streamed, measured and reported. Other settings of
    the checkpoint, such as a `top_p` for sampling, stay in force. The seed and the stop strings are
    not among the arguments.
    """
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None}
    if settings.temperature:
        sampling = {"do_sample": True, "temperature": settings.temperature}
    elif model.generation_config.do_sample:
        sampling |= {"top_p": None, "top_k": None}
    end_ids = end_token_ids(model, settings)
    if model.generation_config.pad_token_id is None:
        sampling["pad_token_id"] = next(iter(end_ids), 0)
    single = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
    limits: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens}
    if settings.min_new_tokens:
        limits["min_new_tokens"] = settings.min_new_tokens
    if settings.stop_token_ids:
        limits["eos_token_id"] = end_ids
    return limits | single | sampling


def _stopping(loaded: LoadedModel, settings: GenerationSettings) -> StoppingCriteriaList:
    """Build stopping criteria for the stop strings of the settings; empty if there are none.

    The option `stop_strings` of `generate` would not reach a custom generation method.
    """
    stops = list(settings.stop_strings)
    return StoppingCriteriaList([StopStringCriteria(loaded.tokenizer, stops)] if stops else [])


def end_token_ids(model: Any, settings: GenerationSettings) -> list[int]:
    """Return the ids of the tokens that end an answer: the model's own, then the settings'.

    The list is empty if neither has any.
    """
    ids = model.generation_config.eos_token_id
    own = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return [*own, *settings.stop_token_ids]


def _first_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    """Return where the first stop string begins in a text; None if it contains none."""
    return min((text.find(stop) for stop in stop_strings if stop in text), default=None)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers within this block, and restore the caller's state after it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _CountingCache(CompressedCache):
    """A cache that counts the forward passes of its model in `passes`."""

    passes = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.passes += layer_idx == self._first
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Stopwatch(TextStreamer):
    """A streamer that records the time of every token, and passes finished text to a function.

    The text begins with `answer_start`, which is passed just before the first token, and ends
    before the first stop string. The times begin when the object is created, and can be read after
    the first token.
    """

    def __init__(
        self,
        tokenizer: Any,
        on_text: TextSink | None,
        stop_strings: Sequence[str],
        answer_start: str = "",
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text, self._answer_start = on_text, answer_start
        self._stop_strings = stop_strings
        self._text, self._passed = "", 0
        self._start = time.perf_counter()
        self._arrivals: list[float] = []
        self._counts: list[int] = []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            if self._on_text and not self._arrivals:
                self._on_text(self._answer_start)
            self._arrivals.append(time.perf_counter())
            self._counts.append(value.numel())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._text += text.rstrip(_HALF) if stream_end else text
        end = _first_stop(self._text, self._stop_strings)
        if end is None:  # hold back what may begin a stop string
            longest = max(map(len, self._stop_strings), default=1)
            end = len(self._text) - (0 if stream_end else longest - 1)
        if self._on_text and end > self._passed:
            self._on_text(self._text[self._passed : end])
            self._passed = end

    @property
    def first_token_ms(self) -> float:
        return (self._arrivals[0] - self._start) * 1000

    @property
    def total_ms(self) -> float:
        return (self._arrivals[-1] - self._start) * 1000

    @property
    def token_ms(self) -> float | None:
        """The milliseconds per token after the first one; None if there is only one.

        They are the median, or the mean if several tokens arrived together.
        """
        steps = [later - earlier for earlier, later in itertools.pairwise(self._arrivals)]
        if not steps:
            return None
        if max(self._counts) == 1:
            return median(steps) * 1000
        return sum(steps) / sum(self._counts[1:]) * 1000


def costs(given: Answer) -> dict[str, Any]:
    """Return the costs of an answer as a new dict, whose keys are the columns of result tables.

    "prompt_tokens", "new_tokens" and "kept_tokens" are numbers of tokens; "held_bytes" and
    "full_bytes" are the bytes of the cache and of a full cache; "first_token_ms" and "token_ms" are
    milliseconds. "token_ms" is None if the answer has only one token.
    """
    return {
        "prompt_tokens": given.prompt_tokens,
        "new_tokens": given.new_tokens,
        "kept_tokens": given.kept_tokens,
        "held_bytes": given.cache.held_bytes,
        "full_bytes": given.cache.full_bytes,
        "first_token_ms": given.first_token_ms,
        "token_ms": given.token_ms,
    }


def answers_together(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    policy: Policy,
    settings: GenerationSettings,
    quantize: Quantize | None = None,
) -> list[str]:
    """Answer several prompts in one batch.

    Up to rounding, each answer is the one that its prompt alone would get. Shorter prompts are
    padded on the left, and every row is compressed separately. The batch runs until its last answer
    has ended.

    Args:
        loaded: the model and its tokenizer.
        prompts: at least one prompt. All are compressed at their ends, even if `context_characters`
            says otherwise.
        policy: selects the tokens to keep of every prompt.
        settings: how the answers are generated, greedily.
        quantize: the format of stored keys and values: "int8", "int4", "K8V4" or a
            `KVCodes`; None for the dtype of the model.

    Returns:
        The texts of the answers, in the order of the prompts. Each begins with the `answer_start`
        of its prompt and ends before the first stop string.

    Raises:
        InvalidArgumentError: the temperature is not 0, the policy reads prompts twice, or it cannot
            compress these prompts.
        PromptTooLongError: a prompt and its answer need more positions than the model has.
        UnsupportedModelError: the model's cache cannot be compressed, or the model has no gate for
            a policy that needs one.
        OutOfMemoryError: the batch does not fit in the memory of the device.
    """
    if settings.temperature:
        raise wrong(
            "temperature",
            "the temperature must be 0 to answer several prompts together, but got "
            f"{settings.temperature}",
            "Ask the prompts one at a time",
        )
    require_one_reading(policy, "Ask the prompts one by one, with the question hidden from it")
    model, tokenizer = loaded.model, loaded.tokenizer
    rows = [prompt_ids(loaded, prompt, settings)[0] for prompt in prompts]
    options, ends = generate_options(model, settings), end_token_ids(model, settings)
    ids = _left_padded(rows, next(iter(ends), 0))
    cache = CompressedCache(model, loaded.completed(policy), quantize=quantize)
    advice = (
        f"prompts: {len(rows)} prompts of up to {ids.shape[1]:,} tokens do not fit in the memory "
        "of the device. Answer fewer of them at once."
    )
    with out_of_memory_explained(lambda: advice):
        output: Tensor = model.generate(
            ids,
            attention_mask=_left_padded([torch.ones_like(row) for row in rows], 0),
            **passed(cache),
            stopping_criteria=_stopping(loaded, settings),
            **options,
        )
    texts = []
    for prompt, new_ids in zip(prompts, output[:, ids.shape[1] :].tolist(), strict=True):
        kept = until_end(new_ids, ends)
        text = tokenizer.decode(kept, skip_special_tokens=True).rstrip(_HALF)
        texts.append(prompt.answer_start + text[: _first_stop(text, settings.stop_strings)])
    return texts


def _left_padded(rows: Sequence[Tensor], pad: int) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=pad, padding_side="left")


def until_end(token_ids: list[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the generated tokens up to and including the first end token; all if there is none."""
    stops = [place for place, token in enumerate(token_ids) if token in ends]
    return tuple(token_ids[: stops[0] + 1] if stops else token_ids)
