"""What a request says of spans of its prompt: which go, which stay, which keep a few tokens.

Neither torch nor vLLM is needed here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from snapkv.policies.spans import Span, Spans
from snapkv.validation import require_int
from snapkv_vllm.admission.names import PREFIX, SPANS, printable, require_readable, wrong

SPANS_FIELD = PREFIX + SPANS

DROP, PROTECT, COMPRESS = "drop", "protect", "compress"

_FIELDS = ("start", "end", "do", "budget")

_MAX_ENTRIES, _MAX_COMPRESSED = 1024, 8
"""Entries of a request, and how many of them choose for themselves, each at the price of one."""

_MAX_CHARACTERS = 200 * _MAX_ENTRIES
"""Characters of the entries as JSON."""


_NONE = Spans(())


@dataclass(frozen=True, kw_only=True)
class SpanEdit:
    """What becomes of one span of tokens."""

    do: str
    span: Span
    budget: int = 0  # tokens that stay of each span that is compressed


def parse_spans(given: object) -> tuple[SpanEdit, ...]:
    """The entries of a request: a list of objects, or such a list as JSON.

    Raises:
        InvalidArgumentError: what is no such list, a wrong value, or too many of them.
        InvalidTypeError: a value of the wrong type.
    """
    if isinstance(given, str) and len(given) <= _MAX_CHARACTERS:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise wrong(SPANS_FIELD, "a list of spans", "what is no JSON", "pass one") from None
    if not isinstance(given, list | tuple):
        example = '[{"start": 10, "end": 500, "do": "drop"}]'
        raise wrong(
            SPANS_FIELD,
            f"a list such as {example}",
            f"something of type {type(given).__name__}",
            "pass one",
        )
    if len(given) > _MAX_ENTRIES:
        raise wrong(
            SPANS_FIELD, f"at most {_MAX_ENTRIES:,} spans", f"{len(given):,}", "join neighbours"
        )
    entries = tuple(_parse_entry(one) for one in given)
    chosen = sum(entry.do == COMPRESS for entry in entries)
    if chosen > _MAX_COMPRESSED:
        raise wrong(
            SPANS_FIELD, f"at most {_MAX_COMPRESSED} to compress", chosen, "join neighbours"
        )
    return entries


def _parse_entry(given: object) -> SpanEdit:
    if not isinstance(given, Mapping):
        raise wrong(
            SPANS_FIELD,
            "objects in the list",
            f"something of type {type(given).__name__}",
            "pass objects",
        )
    for name in given:
        if name not in _FIELDS:
            got = (
                printable(name)
                if isinstance(name, str)
                else f"something of type {type(name).__name__}"
            )
            raise wrong(SPANS_FIELD, f"fields among {', '.join(_FIELDS)}", got, "leave it out")
    do = given.get("do")
    if not isinstance(do, str) or do not in (DROP, PROTECT, COMPRESS):
        got = (
            f"'{printable(do)}'"
            if isinstance(do, str)
            else f"something of type {type(do).__name__}"
        )
        raise wrong(
            f"{SPANS_FIELD}: do", f"{DROP}, {PROTECT} or {COMPRESS}", got, "pass one of them"
        )
    budget = 0
    if do == COMPRESS:
        budget = _parse_number(given, "budget", minimum=1)
    elif "budget" in given:
        raise wrong(f"{SPANS_FIELD}: budget", f"none with {do}", "one", "leave it out")
    start, end = _parse_number(given, "start"), _parse_number(given, "end")
    if start >= end:
        raise wrong(
            SPANS_FIELD, "a start below its end", f"{start} and {end}", "end is after the last"
        )
    return SpanEdit(do=do, budget=budget, span=(start, end))


def _parse_number(given: Mapping[str, Any], name: str, minimum: int = 0) -> int:
    require_readable(f"{SPANS_FIELD}: {name}", given.get(name))
    require_int(f"{SPANS_FIELD}: {name}", value := given[name], minimum=minimum)
    return int(value)


@dataclass(frozen=True)
class RequestSpans:
    """What becomes of spans of a prompt, which do not overlap where that differs.

    Attributes:
        drop: of which no keys and values stay.
        protect: that stay whole.
        compress: with how many of its tokens stay.
    """

    drop: Spans = _NONE
    protect: Spans = _NONE
    compress: tuple[tuple[Span, int], ...] = ()

    @classmethod
    def from_edits(cls, entries: Sequence[SpanEdit]) -> Self:
        """The spans of a request's entries."""
        parts: dict[str, list[tuple[Span, int]]] = {DROP: [], PROTECT: [], COMPRESS: []}
        for entry in entries:
            size = entry.span[1] - entry.span[0]
            whole = entry.do == COMPRESS and entry.budget >= size
            parts[PROTECT if whole else entry.do].append((entry.span, entry.budget))
        drop, protect = (
            Spans.of(SPANS_FIELD, [span for span, _ in parts[do]]) for do in (DROP, PROTECT)
        )
        found = cls(drop, protect, tuple(sorted(parts[COMPRESS])))
        found._require_disjoint()
        return found

    def _require_disjoint(self) -> None:
        parts = [(span, DROP) for span in self.drop.parts]
        parts += [(span, PROTECT) for span in self.protect.parts]
        parts += [(span, COMPRESS) for span, _ in self.compress]
        before, what = (0, 0), ""
        for span, do in sorted(parts):
            if what and span[0] < before[1]:
                got = f"{before[0]} to {before[1]} ({what}) and {span[0]} to {span[1]} ({do})"
                raise wrong(SPANS_FIELD, "spans that do not overlap", got, "cut one of them")
            before, what = span, do

    def __bool__(self) -> bool:
        return bool(self.drop.parts or self.protect.parts or self.compress)

    @property
    def dropped_tokens_of_spans(self) -> int:
        """Tokens that every head drops for them."""
        lost = sum(end - start - budget for (start, end), budget in self.compress)
        return self.drop.tokens + lost

    @property
    def all_spans(self) -> Spans:
        """All that is not left to the method."""
        compressed = [span for span, _ in self.compress]
        return Spans.of(SPANS_FIELD, [*self.drop.parts, *self.protect.parts, *compressed])

    def with_protected_start(self, first_tokens: int) -> Self:
        """The same with the first tokens protected, too."""
        if not first_tokens:
            return self
        protect = Spans.of(SPANS_FIELD, [*self.protect.parts, (0, first_tokens)])
        found = replace(self, protect=protect)
        found._require_disjoint()
        return found

    def require_fit(self, prompt_tokens: int, window_tokens: int) -> None:
        """Refuse spans beyond a prompt, of its last token, or of the window and to be chosen from.

        `window_tokens` is how many of the last ones stay whatever the votes.
        """
        ends = {
            DROP: (prompt_tokens - 1, self.drop.parts, "its last token stays"),
            PROTECT: (prompt_tokens, self.protect.parts, "it ends there"),
            COMPRESS: (
                prompt_tokens - window_tokens,
                [span for span, _ in self.compress],
                f"its last {window_tokens} stay",
            ),
        }
        for do, (most, spans, why) in ends.items():
            for start, end in spans:
                if end > most:
                    within = f"an end of at most {most:,} to {do} in a prompt of {prompt_tokens:,}"
                    got = f"{start:,} to {end:,}"
                    raise wrong(
                        SPANS_FIELD, f"{within} tokens, since {why}", got, "pass another span"
                    )
