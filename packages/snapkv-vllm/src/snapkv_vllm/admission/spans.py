"""The spans of a prompt that a request drops, protects or compresses.

This module imports neither torch nor vLLM.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from snapkv.policies.spans import Span, Spans
from snapkv.validation import require_int
from snapkv_vllm.admission.names import PREFIX, SPANS, describe, require_readable, wrong

SPANS_FIELD = PREFIX + SPANS

DROP, PROTECT, COMPRESS = "drop", "protect", "compress"

_FIELDS = ("start", "end", "do", "budget")

_MAX_ENTRIES, _MAX_COMPRESSED = 1024, 8

_MAX_CHARACTERS = 200 * _MAX_ENTRIES
"""The largest number of characters of the list as JSON."""


_NONE = Spans(())


@dataclass(frozen=True, kw_only=True)
class SpanEdit:
    """A span of the prompt, and what a request does with the tokens in it: `DROP`, `PROTECT` or
    `COMPRESS`.
    """

    do: str
    span: Span
    budget: int = 0  # the number of tokens that a compressed span keeps


def parse_spans(value: object) -> tuple[SpanEdit, ...]:
    """Check the list of spans that a request has sent, and return its edits in the same order. It
    is not checked whether they overlap or lie inside the prompt.

    Args:
        value: a list of objects, or JSON text of such a list.

    Raises:
        RefusedError: there is no list, it is too long, too many of its spans are compressed, or one
            of its values is wrong.
        InvalidTypeError: a number has the wrong type or is missing.
        InvalidArgumentError: a number is out of range.
    """
    if isinstance(value, str) and len(value) <= _MAX_CHARACTERS:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise wrong(SPANS_FIELD, "the text is not valid JSON", "Send a list of spans") from None
    if not isinstance(value, list | tuple):
        example = '[{"start": 10, "end": 500, "do": "drop"}]'
        problem = f"expected a list of objects, but got {describe(value)}"
        raise wrong(SPANS_FIELD, problem, f"For example, send {example}")
    if len(value) > _MAX_ENTRIES:
        problem = f"the list can have at most {_MAX_ENTRIES:,} spans, but got {len(value):,}"
        raise wrong(SPANS_FIELD, problem, "Combine spans that follow each other into one")
    entries = tuple(map(_parse_entry, value))
    count = sum(entry.do == COMPRESS for entry in entries)
    if count > _MAX_COMPRESSED:
        problem = f"at most {_MAX_COMPRESSED} spans of a request can be compressed, but got {count}"
        raise wrong(SPANS_FIELD, problem, "Combine spans that follow each other into one")
    return entries


def _parse_entry(entry: object) -> SpanEdit:
    """Check one object of the list of spans, and return it as an edit.

    Raises:
        RefusedError: a field is unknown or wrong, or the start is not below the end.
        InvalidTypeError: a number has the wrong type or is missing.
        InvalidArgumentError: a number is out of range.
    """
    if not isinstance(entry, Mapping):
        problem = f"every span must be an object with fields, but got {describe(entry)}"
        raise wrong(SPANS_FIELD, problem, f"Send objects with the fields {', '.join(_FIELDS)}")
    for name in entry:
        if name not in _FIELDS:
            problem = (
                f"a span can only have the fields {', '.join(_FIELDS)}, but got {describe(name)}"
            )
            raise wrong(SPANS_FIELD, problem, "Remove this field from the span")
    do = entry.get("do")
    if not isinstance(do, str) or do not in (DROP, PROTECT, COMPRESS):
        problem = (
            f"the value must be one of {DROP}, {PROTECT} and {COMPRESS}, but got {describe(do)}"
        )
        raise wrong(f"{SPANS_FIELD}: do", problem, "Use one of these three words")
    budget = 0
    if do == COMPRESS:
        budget = _parse_number(entry, "budget", minimum=1)
    elif "budget" in entry:
        problem = f"only spans to {COMPRESS} can have a budget, but this span has the action {do}"
        raise wrong(f"{SPANS_FIELD}: budget", problem, "Remove the budget from the span")
    start, end = _parse_number(entry, "start"), _parse_number(entry, "end")
    if start >= end:
        problem = f"the start must be less than the end, but got {start} and {end}"
        raise wrong(SPANS_FIELD, problem, "Use the position after the last token as the end")
    return SpanEdit(do=do, budget=budget, span=(start, end))


def _parse_number(entry: Mapping[str, Any], name: str, minimum: int = 0) -> int:
    require_readable(f"{SPANS_FIELD}: {name}", entry.get(name))
    require_int(f"{SPANS_FIELD}: {name}", value := entry[name], minimum=minimum)
    return int(value)


@dataclass(frozen=True)
class RequestSpans:
    """All spans of the prompt that a request edits. Spans with different edits do not overlap.

    Attributes:
        drop: spans whose keys and values are removed after the prompt.
        protect: spans that are kept whatever the votes.
        compress: spans of which only the given number of tokens are kept.
    """

    drop: Spans = _NONE
    protect: Spans = _NONE
    compress: tuple[tuple[Span, int], ...] = ()

    @classmethod
    def from_edits(cls, entries: Sequence[SpanEdit]) -> Self:
        """Build the spans of a request from its edits.

        Spans to drop that overlap or touch are merged, and so are spans to protect. A span to
        compress whose budget is at least its length is protected instead.

        Raises:
            RefusedError: spans with different edits overlap, or two spans to compress do.
        """
        parts: dict[str, list[tuple[Span, int]]] = {DROP: [], PROTECT: [], COMPRESS: []}
        for entry in entries:
            size = entry.span[1] - entry.span[0]
            is_protected = entry.do == COMPRESS and entry.budget >= size
            parts[PROTECT if is_protected else entry.do].append((entry.span, entry.budget))
        spans = {do: [span for span, _ in found] for do, found in parts.items()}
        drop, protect = (Spans.of(SPANS_FIELD, spans[do]) for do in (DROP, PROTECT))
        found = cls(drop, protect, tuple(sorted(parts[COMPRESS])))
        found._require_disjoint()
        return found

    def _require_disjoint(self) -> None:
        """Check that no two spans overlap. Spans to drop were merged with each other before, and so
        were spans to protect.

        Raises:
            RefusedError: two spans overlap.
        """
        parts = [(span, DROP) for span in self.drop.parts]
        parts += [(span, PROTECT) for span in self.protect.parts]
        parts += [(span, COMPRESS) for span, _ in self.compress]
        before, before_do = (0, 0), ""
        for span, do in sorted(parts):
            if before_do and span[0] < before[1]:
                both = f"{before[0]} to {before[1]} ({before_do}) and {span[0]} to {span[1]} ({do})"
                raise wrong(SPANS_FIELD, f"the spans {both} overlap", "Make one of them shorter")
            before, before_do = span, do

    def __bool__(self) -> bool:
        return bool(self.drop.parts or self.protect.parts or self.compress)

    @property
    def dropped_tokens(self) -> int:
        """How many tokens are dropped in every head because of the spans: those to drop, and those
        of a compressed span that are above its budget.
        """
        lost = sum(end - start - budget for (start, end), budget in self.compress)
        return self.drop.tokens + lost

    @property
    def all_spans(self) -> Spans:
        """All spans of the request, joined into one set of tokens."""
        compressed = [span for span, _ in self.compress]
        return Spans.of(SPANS_FIELD, [*self.drop.parts, *self.protect.parts, *compressed])

    def with_protected_start(self, first_tokens: int) -> Self:
        """Return these spans with the first `first_tokens` tokens protected as well. The result is
        a copy, or this object if `first_tokens` is 0.

        Raises:
            RefusedError: one of these tokens is dropped or compressed.
        """
        if not first_tokens:
            return self
        protect = Spans.of(SPANS_FIELD, [*self.protect.parts, (0, first_tokens)])
        found = replace(self, protect=protect)
        found._require_disjoint()
        return found

    def require_fit(self, prompt_tokens: int, window_tokens: int) -> None:
        """Check that all spans of the request lie inside its prompt, and that none drops or
        compresses tokens at the end that are always kept.

        Args:
            prompt_tokens: the length of the prompt, whose last token cannot be dropped.
            window_tokens: how many last tokens the method always keeps, which cannot be compressed.

        Raises:
            RefusedError: a span ends too late.
        """
        ends = {
            DROP: (prompt_tokens - 1, self.drop.parts, "the last token is kept"),
            PROTECT: (prompt_tokens, self.protect.parts, "the prompt ends before"),
            COMPRESS: (
                prompt_tokens - window_tokens,
                [span for span, _ in self.compress],
                f"the last {window_tokens} are kept",
            ),
        }
        for do, (most, spans, why) in ends.items():
            for start, end in spans:
                if end > most:
                    prompt = f"a prompt of {prompt_tokens:,} tokens"
                    problem = (
                        f"it is not possible to {do} {start:,} to {end:,} of {prompt}, because "
                        f"{why}"
                    )
                    raise wrong(
                        SPANS_FIELD,
                        problem,
                        f"Use a span that ends at position {most:,} or earlier",
                    )
