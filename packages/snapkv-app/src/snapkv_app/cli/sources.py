"""The sources that `ask` and `generate` answer from: a text, files, or a library."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from time import perf_counter
from typing import Any, ClassVar

from snapkv.errors import wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import cache_among
from snapkv.kvzip import require_one_reading
from snapkv.policies import FullCache, Policy
from snapkv.policies.default import method_name
from snapkv.storage.bits import Bits
from snapkv.validation import DEFAULT, DEFAULT_RECOMPUTE
from snapkv_app import draft_methods, text_files
from snapkv_app.answering import Answer, TextSink, answer, answer_ids, require_positions
from snapkv_app.cli.amounts import ReadingLimit
from snapkv_app.cli.announcing import announce, announce_model
from snapkv_app.cli.changes import FEWEST_TOKENS, Change, changed_command, explained_length
from snapkv_app.cli.library import like
from snapkv_app.cli.loading import load_model, load_other, reading_progress
from snapkv_app.cli.options import DRAFTS, AskOptions, RunOptions
from snapkv_app.cli.policy import build_policy, usual_bits
from snapkv_app.draft_methods import DraftMethod
from snapkv_app.library.about import question_ids
from snapkv_app.library.library import Library
from snapkv_app.library.records import Text
from snapkv_app.library.searching import Hit
from snapkv_app.models import LoadedModel
from snapkv_app.passages import Excerpts, PassageChoice
from snapkv_app.prompts import Prompt, chat_prompt, question_prompt, text_prompt
from snapkv_app.protection import Protection
from snapkv_app.reading import TimeTooShortError, reading_speed, reading_until
from snapkv_app.settings import GenerationSettings

_MOST_PLACES = 12
"""The number of passages that the line below an answer names; `--json` has all."""

_MOST_OF_TIME = 0.8
"""The part of the time that is planned, since a long text takes longer per token."""


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A source to answer from, with the model that reads it.

    Attributes:
        options: the options of the command.
        policy: the method that compresses the cache.
        loaded: the model.
        typed: the command line, as it was typed.
        warnings: warnings about the documents.
        exactly: the change of options that makes the prefill exact; empty if it is exact.
    """

    options: RunOptions
    policy: Policy
    loaded: LoadedModel
    typed: Sequence[str]
    warnings: list[str]
    exactly: Change = field(default_factory=dict)

    @property
    def settings(self) -> GenerationSettings:
        """The settings of generation."""
        return self.options.settings()

    @property
    def bits(self) -> tuple[Bits | None, str]:
        """The bits in which the cache stores keys and values, and why the default does not apply.

        The bits are None for an unquantized cache. The reason is empty, except if the default
        quantization is impossible.
        """
        return usual_bits(self.policy, self.loaded.model, self.options)

    def answer(self, on_text: TextSink | None) -> Answer:
        """Compute the answer of the method, and pass its text to `on_text` as it is generated.

        While the model reads, a terminal shows a progress bar. With None, no text is passed on.

        Raises:
            SnapKVError: the prompt cannot be read or compressed, see `answering.answer`.
        """
        with reading_progress(self.loaded.model, method_name(self.policy.describe())) as bar:
            return self._answer(on_text and bar.before(on_text))

    def full_answer(self, tokens: int) -> Answer:
        """Compute the answer of the full cache, with at most `tokens` tokens.

        Raises:
            SnapKVError: the prompt cannot be read, see `answering.answer`.
        """
        with reading_progress(self.loaded.model, FullCache.name):
            return self._full_answer(replace(self.settings, max_new_tokens=tokens))

    @abstractmethod
    def _answer(self, on_text: TextSink | None) -> Answer: ...

    @abstractmethod
    def _full_answer(self, settings: GenerationSettings) -> Answer: ...

    @abstractmethod
    def request(self) -> dict[str, Any]:
        """Return the part of the JSON output that repeats what was asked, as a new dict."""

    def cited(self) -> list[str]:
        """Return the lines to print between an answer and its costs; none for this class."""
        return []


@dataclass(frozen=True, kw_only=True)
class PromptSource(Source):
    """A source whose prompt the model reads now, with the text of files in it."""

    keeps_system: ClassVar[bool | None]
    """Whether a system message is kept by default. None: if there is one, and the budget allows."""

    documents: Sequence[Text]
    protection: Protection
    drafts: DraftMethod | None

    @property
    @abstractmethod
    def prompt(self) -> Prompt:
        """The prompt that the model reads."""

    def _answer(self, on_text: TextSink | None) -> Answer:
        return self._read(
            self.policy,
            self.settings,
            drafts=self.drafts,
            prefill=self.options.reading,
            quantize=self.bits[0],
            on_text=on_text,
        )

    def _full_answer(self, settings: GenerationSettings) -> Answer:
        return self._read(FullCache(), settings)

    def _read(self, policy: Policy, settings: GenerationSettings, **ways: Any) -> Answer:
        protection = self.protection
        return answer(self.loaded, self.prompt, policy, settings, protection=protection, **ways)

    def request(self) -> dict[str, Any]:
        """Return the part of the JSON output that repeats what was asked.

        Returns:
            A new dict with "documents", the names of the documents, and "warnings", the list of the
            source's warnings itself. Subclasses add further keys.
        """
        return {"documents": [each.name for each in self.documents], "warnings": self.warnings}


def open_prompt(
    kind: type[PromptSource], options: RunOptions, policy: Policy, **given: Any
) -> PromptSource:
    """Check that the options fit together, then load the model and make the prompt.

    Args:
        kind: the class of the source.
        options: the options of the command.
        policy: the method that compresses the cache.
        given: the other fields of `kind`, except `protection`, `loaded` and `drafts`, which are
            made here.

    Raises:
        InvalidArgumentError: tokens cannot be drafted with these options, or a text to protect is
            empty.
        SnapKVError: the model cannot be loaded, or the prompt cannot be made.
    """
    given["protection"] = protection_of(options, system=kind.keeps_system)
    _require_valid_drafts(options, policy)
    loaded = load_model(options)
    drafts = _draft_method(options, loaded)
    made = kind(options=options, policy=policy, loaded=loaded, drafts=drafts, **given)
    _ = made.prompt  # made here, since its messages would break a progress bar
    return made


@dataclass(frozen=True, kw_only=True)
class TextSource(PromptSource):
    """Files followed by a text, which the model continues or answers as a message."""

    keeps_system = False

    text: str
    is_chat: bool

    @cached_property
    def prompt(self) -> Prompt:
        """The text of the files, and after it the text to continue or to answer.

        Raises:
            InvalidArgumentError: the text is a message, and the model has no chat template.
        """
        text = "\n\n".join(filter(None, [text_files.join(self.documents), self.text]))
        make = chat_prompt if self.is_chat else text_prompt
        return make(self.loaded.tokenizer, text, answer_start=self.options.answer_start)

    def request(self) -> dict[str, Any]:
        """Return the part of the JSON output that repeats what was asked.

        Returns:
            A new dict with "documents", their names; "warnings" about them; and "prompt", the text.
        """
        return super().request() | {"prompt": self.text}


@dataclass(frozen=True, kw_only=True)
class FilesSource(PromptSource):
    """Files and a question about them; of long files only the passages that match the question."""

    keeps_system = None

    options: AskOptions
    question: str

    @property
    def prompt(self) -> Prompt:
        """The documents, or the passages that were chosen last, then the question.

        With `passages`, the first access chooses them, which measures the speed of the model.

        Raises:
            DocumentError: the documents are too long, and contain no word of the question.
            InvalidArgumentError: the policy reads prompts twice, and the chat template has
                rewritten the question.
        """
        whole = self.options.passages is None
        return self._prompt_about(self.documents if whole else self._choice.chosen[-1].documents)

    @cached_property
    def _choice(self) -> PassageChoice:
        """The choice of what is read, which has chosen at least one time.

        First it has chosen what fits into the tokens of `passages` and the positions of the model;
        then, if that takes too long here, what fits into the seconds as well.

        Raises:
            DocumentError: the documents are too long, and contain no word of the question.
            InvalidArgumentError: one passage has more tokens than `passages`.
        """
        limit = self.options.passages
        new_tokens, positions = self.options.max_new_tokens, self.loaded.max_tokens
        most = limit.tokens if positions is None else min(limit.tokens, positions - new_tokens)
        choice = PassageChoice(self.documents, self.question, self._count_tokens)
        announce("choosing what to read")
        if (tokens := choice.choose(most).tokens) > limit.tokens:
            raise wrong(
                "passages",
                f"expected at least the {tokens:,} tokens of the best passage and the question, "
                f"but got {limit.tokens}",
                f"Use --passages {tokens}",
            )
        if tokens > FEWEST_TOKENS:
            in_time = int(reading_speed(self.loaded.model) * limit.seconds / self._readings)
            if choice.chosen[-1].tokens > in_time:
                choice.choose(in_time)
        _announce_reading(choice.chosen[-1], limit)
        return choice

    @property
    def _readings(self) -> int:
        """The time of reading the documents, as a multiple of the time of a single pass.

        The second pass of KVzip takes about as long as two.
        """
        return 3 if self.policy.needs_reconstruction_pass else 1

    def _answer(self, on_text: TextSink | None) -> Answer:
        if self.options.passages is None:
            return super()._answer(on_text)
        end = perf_counter() + self.options.passages.seconds / self._readings
        while True:
            try:
                with reading_until(self.loaded.model, end):
                    return super()._answer(on_text)
            except TimeTooShortError as error:
                self._choose_fewer(error.needed, error.left)

    def _choose_fewer(self, needed: float, left: float) -> None:
        """Choose fewer passages for the model to read, so that they fit into the time.

        Args:
            needed: the seconds that reading the last choice would take in one pass.
            left: the seconds that are left for one pass.

        Raises:
            InvalidArgumentError: one passage is too long for the time.
        """
        tokens, limit = self._choice.chosen[-1].tokens, self.options.passages
        fewer = self._choice.choose(int(_MOST_OF_TIME * tokens * left / needed))
        if fewer.tokens == tokens:
            needed, left = self._readings * needed, self._readings * max(left, 0)
            longer = limit.longer(needed / limit.seconds)
            raise wrong(
                "passages",
                f"reading one passage of {tokens:,} tokens takes about {needed:,.0f} seconds on "
                f"this machine, but only {left:,.0f} of the {limit.seconds:,} seconds are left",
                f"Use --passages {longer} to allow more time, or choose a smaller model",
            )
        _announce_reading(fewer, limit)

    def _prompt_about(self, read: Sequence[Text]) -> Prompt:
        prompt = question_prompt(
            self.loaded.tokenizer,
            text_files.join(read),
            self.question,
            answer_start=self.options.answer_start,
        )
        return prompt.hiding_question() if self.policy.needs_reconstruction_pass else prompt

    def _count_tokens(self, read: Sequence[Text]) -> int:
        return len(self._prompt_about(read).encoded(self.loaded.tokenizer)[0])

    def request(self) -> dict[str, Any]:
        """Return the part of the JSON output that repeats what was asked.

        Returns:
            A new dict with "documents", their names; "warnings" about them; "question"; and
            "passages", which is None if the documents were read in full. Otherwise it is a dict of
            the numbers of passages that were "read", of all passages in "of", and of those
            "fitting" into the number of tokens alone; and "places", each with "document" and
            "lines".
        """
        about = super().request() | {"question": self.question, "passages": None}
        if found := self._excerpts:
            places = [asdict(place) for place in found.places]
            about["passages"] = {"read": found.read, "of": found.of, "places": places}
            about["passages"]["fitting"] = self._choice.chosen[0].read or found.of
        return about

    @property
    def _excerpts(self) -> Excerpts | None:
        """The passages that were read, or None if the documents were read in full."""
        if self.options.passages is None or not self._choice.chosen[-1].places:
            return None
        return self._choice.chosen[-1]

    def cited(self) -> list[str]:
        """Return a line on how many passages were read, and their lines in the documents.

        Another line says if the time was too short for all passages that fit into the tokens, with
        a command that reads them. Empty if the documents were read in full.
        """
        if not (found := self._excerpts):
            return []
        shown, places = [], found.places[:_MOST_PLACES]
        for name, own in groupby(places, key=lambda place: place.document):
            lines = ", ".join(f"{first:,}-{last:,}" for first, last in (each.lines for each in own))
            is_of_one = len(self.documents) == 1
            shown.append(f"lines {lines}" if is_of_one else f"{name}, lines {lines}")
        if more := len(found.places) - len(places):
            shown.append(f"and {more:,} more places")
        cited = [f"read {found.read:,} of {found.of:,} passages: {'; '.join(shown)}"]
        fitting, limit = self._choice.chosen[0], self.options.passages
        if found.tokens < fitting.tokens:
            change = {"passages": limit.longer(fitting.tokens / found.tokens)}
            cited.append(
                f"{limit.seconds:,} s were enough for {found.tokens:,} of {fitting.tokens:,} "
                f"tokens; to read all of them: {changed_command(self.typed, change)}"
            )
        return cited

    def _read(self, policy: Policy, settings: GenerationSettings, **ways: Any) -> Answer:
        typed = self.typed if self.options.passages is None else []
        with explained_length(self.loaded, self.question, self.settings, typed):
            return super()._read(policy, settings, **ways)


def _announce_reading(read: Excerpts, limit: ReadingLimit) -> None:
    passages = f", {read.read:,} of {read.of:,} passages" if read.places else ""
    announce(f"reading {read.tokens:,} tokens{passages}, in at most {limit.seconds:,} s")


@dataclass(frozen=True, kw_only=True)
class LibrarySource(Source):
    """The documents of a library that match a question best, which have been read before."""

    options: AskOptions
    library: Library
    question: str
    hits: Sequence[Hit]  # the best match first
    search_ms: float  # included in the time to the first token
    is_partial: bool  # whether compressed documents are joined without being read again

    @property
    def recompute(self) -> float:
        """The fraction of the documents' tokens that the second layer computes again."""
        return DEFAULT_RECOMPUTE if self.options.recompute is None else self.options.recompute

    @property
    def bits(self) -> tuple[Bits | None, str]:
        """The bits in which the cache stores keys and values, and why the default does not apply.

        The bits are None for an unquantized cache. The reason is empty, except if the default
        quantization is impossible. That is also so if compressed documents are joined without being
        read again.
        """
        quantize, why = super().bits
        if quantize is not None and self.is_partial:
            return None, "unquantized, since the documents were compressed when added"
        return quantize, why

    def _answer(self, on_text: TextSink | None) -> Answer:
        start = perf_counter()
        given = self.library.inputs(
            *self._inputs,
            **self._answer_start,
            policy=self.loaded.completed(self.policy),
            recompute=self.recompute,
            quantize=self.bits[0],
        )
        before_ms = self.search_ms + 1000 * (perf_counter() - start)
        inputs = given["input_ids"], cache_among(given)
        found, _ = answer_ids(
            self.loaded, *inputs, self.settings, **self._answer_start, on_text=on_text
        )
        return found.later(before_ms)

    def _full_answer(self, settings: GenerationSettings) -> Answer:
        ids = self.library.token_ids(*self._inputs, **self._answer_start)
        cache = CompressedCache(self.loaded.model, FullCache())
        return answer_ids(self.loaded, ids, cache, settings, **self._answer_start)[0]

    @property
    def _inputs(self) -> tuple[Any, Any, str, Sequence[Hit]]:
        return self.loaded.model, self.loaded.tokenizer, self.question, self.hits

    @property
    def _answer_start(self) -> dict[str, Any]:
        return {"answer_start": self.options.answer_start}

    def request(self) -> dict[str, Any]:
        """Return the part of the JSON output that repeats what was asked.

        Returns:
            A new dict with "library", its path; "recompute"; "sources", a dict for each document
            with the fields of `Hit` except its key; "warnings"; and "question".
        """
        sources = [asdict(hit) for hit in self.hits]
        return {
            "library": str(self.library.path),
            "recompute": self.recompute,
            "sources": [{name: hit[name] for name in hit if name != "key"} for hit in sources],
            "warnings": self.warnings,
            "question": self.question,
        }

    def cited(self) -> list[str]:
        """Return a line for each document, with the lines of its best passage, and warnings."""
        found = [
            f"source: {hit.name}, lines {hit.lines[0]:,}-{hit.lines[1]:,}" for hit in self.hits
        ]
        return [*found, *(f"warning: {line}" for line in self.warnings)]


def open_library(
    options: AskOptions,
    library: Library,
    question: str,
    hits: Sequence[Hit],
    warnings: list[str],
    **given: Any,
) -> LibrarySource:
    """Load the model, and leave out documents that it has no positions for.

    Args:
        options: the options of the command.
        library: the library, which must contain documents.
        question: the question to answer.
        hits: the documents that match the question, the best match first.
        warnings: warnings about the documents. This function and the library add to the list.
        given: the fields `search_ms` and `typed` of the source.

    Returns:
        The source. If the documents are compressed and no option names a method or a parameter, its
        policy keeps all of their tokens.

    Raises:
        InvalidArgumentError: the policy reads prompts twice, which the documents cannot be.
        LibraryError: there is no library.
        PromptTooLongError: the model has positions for none of the documents.
        SnapKVError: the model cannot be loaded.
    """
    is_compressed = library.required().policy["name"] != FullCache.name
    is_partial = is_compressed and options.recompute != 1
    policy = build_policy(options, alone=is_partial)
    require_one_reading(policy, "Compress the documents by it when they are added")
    if is_compressed and options.policy == DEFAULT and not options.has_parameters:
        options, policy = (
            replace(options, policy=FullCache.name),
            FullCache(),
        )  # the documents are already compressed
    options = like(library, options)
    announce_model(options.model)
    loaded = load_model(options)
    kept = _within_positions(loaded, library, question, hits, options)
    warnings += [
        f"{hit.name}: left out, since the model has no positions for its {hit.tokens:,} tokens"
        for hit in hits
        if hit not in kept
    ]
    return LibrarySource(
        options=options,
        policy=policy,
        loaded=loaded,
        warnings=warnings,
        exactly={} if options.recompute == 1 else {"recompute": 1},
        library=library,
        question=question,
        hits=kept,
        is_partial=is_partial,
        **given,
    )


def _within_positions(
    loaded: LoadedModel, library: Library, question: str, hits: Sequence[Hit], options: AskOptions
) -> list[Hit]:
    """Return the documents that fit into the positions of the model with the question and answer.

    A document that does not fit is left out, and the later ones are still tried. The best match is
    tried first.

    Raises:
        PromptTooLongError: the model has positions for none of them.
    """
    taken = len(library.required().prefix_ids)
    taken += len(question_ids(loaded.tokenizer, question, options.answer_start))
    kept: list[Hit] = []
    for hit in hits:
        if loaded.has_positions(taken + hit.tokens + options.max_new_tokens):
            kept.append(hit)
            taken += hit.tokens
    if not kept:
        require_positions(loaded, taken + hits[0].tokens, options.settings())
    return kept


def protection_of(options: RunOptions, *, system: bool | None) -> Protection:
    """Return the protected tokens of the options.

    Args:
        options: the options of the command.
        system: whether a system message is kept if the options do not say it; None to keep it if
            there is one and the budget allows.

    Raises:
        InvalidArgumentError: a text to protect is empty.
    """
    return Protection(
        texts=tuple(options.protect or ()),
        first_tokens=options.protect_first,
        system=system if options.protect_system is None else options.protect_system,
    )


def _require_valid_drafts(options: RunOptions, policy: Policy) -> None:
    """Raise unless tokens can be drafted as the options say; options without drafts are accepted.

    Raises:
        InvalidArgumentError: there are two sources of drafts, or there is one although the prompt
            is not read in one pass.
    """
    flags = {name: f"--{name.replace('_', '-')}" for name in DRAFTS}
    given = [flag for name, flag in flags.items() if getattr(options, name) is not None]
    if len(given) > 1:
        problem = f"use only one of {', '.join(flags.values())}, but got {' and '.join(given)}"
        raise wrong("drafts", problem, "Use only one of these options")
    if given and policy.needs_reconstruction_pass:
        problem = (
            f"drafts cannot be used with {policy.name}, because the documents are read before the "
        )
        raise wrong("drafts", f"{problem}question, but got {given[0]}", "Remove this option")
    if given and options.prefill != "exact":
        problem = (
            f"drafts cannot be used with --prefill {options.prefill}, because they are verified in "
        )
        problem += f"one pass with the prompt, but got {given[0]}"
        raise wrong("drafts", problem, "Remove one of the two options")


def _draft_method(options: RunOptions, loaded: LoadedModel) -> DraftMethod | None:
    """Return the way to draft tokens that the options choose, or None for plain decoding.

    A model that drafts is loaded here.

    Raises:
        SnapKVError: that model cannot be loaded.
    """
    if options.assistant is not None:
        return draft_methods.assistant(loaded, load_other(options.assistant, options))
    if options.prompt_lookup is not None:
        return draft_methods.prompt_lookup(options.prompt_lookup)
    return None
