"""Check a cache: each row is read again alone, and an oracle reads the batch.

Alone a row is read with no pads, its turns at once, without copies, files or other rows, and
without what was cropped. It must keep the same positions and give the same logits. The oracle is
transformers' own cache, whose attention is masked to what the cache keeps.
"""

import contextlib
import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from snapkv import AcrossLayers, AutoBudget, CompressedCache, SnapKVError, StreamingLLM
from snapkv.hf.model_parts import States, states_of
from snapkv.kvzip import read_twice
from snapkv.policies import EvictingPolicy
from snapkv.policies.base import ALL_QUERIES
from snapkv.prefill import layer_by_layer
from snapkv.storage.bits import KVCodes
from tests.families import require_integrity, small_model
from tests.oracle import hidden_columns, masked_judge, masked_pass
from tests.sequences.operations import Sequence

CHANGES = ("crop", "spans")
"""Kinds of parts that read no tokens."""
CLOSE = 2e-3
"""Allowed difference of logits relative to the largest; float32 sums cause about 1e-4."""
CLOSE_IN_BITS = {"int8": 0.15, "K8V4": 0.7, "int4": 0.7}
"""Allowed difference if quantization groups of a row differ from those of the row alone."""
CLOSE_IN_GROUPS = {"int8": CLOSE, "K8V4": 1e-2, "int4": 1e-2}
"""Allowed difference if the groups are equal; rounding to another code causes about 3e-3."""


@functools.cache
def judge_of(kind: str) -> PreTrainedModel:
    """Return an unwrapped copy of the model whose attention can hide columns."""
    return masked_judge(small_model(kind))


class WrongError(Exception):
    """Raised if a cache differs from what the judge expects."""


def kind_of(error: SnapKVError) -> str:
    """Return the exception class and the problem of an error, without the value that it names."""
    return f"{type(error).__name__}: {str(error).partition(', but got ')[0]}"


def reading(
    model: PreTrainedModel, how: str, piece: int
) -> contextlib.AbstractContextManager[None]:
    """Let the model read layer by layer in this block if `how` is "layers"."""
    if how == "layers":
        return layer_by_layer(model, chunk_tokens=piece)
    return contextlib.nullcontext()


def last_logits_of(model: PreTrainedModel, ids: Tensor, cache: CompressedCache) -> Tensor:
    """Read a context with `read_twice` and return its last logits, (R, 1, V)."""
    found: list[Tensor] = []
    with model.register_forward_hook(lambda *call: found.append(call[-1].logits)):
        read_twice(model, ids, cache, instruction_ids=(5, 6))
    return found[0]


@dataclass
class Part:
    """A "turn" or "step" that was read, or a change, which is repeated for each row alone.

    Attributes:
        start: column of its first token; of a crop, tokens seen before.
        stop: column after the last one that was read; of a crop, tokens seen after.
        ids: (R, stop - start), what was read; of a drop, (R, N, 2) spans of each row.
        end: of a turn, the column where it will end; None if the next pass determines it.
        passes: of a turn, how it was read and up to which column; of spans, how many tokens stay.
    """

    kind: str
    start: int
    stop: int
    ids: Tensor
    end: int | None = None
    passes: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass
class State:
    """A cache and the history of operations on it.

    Attributes:
        cache: the cache that is checked.
        full: the cache of the oracle, or None if the oracle cannot follow.
        ids: (R, tokens seen).
        pads: (R,) number of leading padding columns of each row.
        done: the finished parts, without the open turn.
        turn: the turn that is open, or None.
        prompt_end: the prompt length that was announced to the cache, or None.
        logits: (R, N, V) of the last N columns of the turn that is open.
        alone: for each row, a cache that has read it alone and its number of parts; None at first.
        short_by: number of last queries that crops removed; they vote at the end of a short turn.
        resumed_at: tokens seen after the last of those crops.
        dropped: (R, columns) bool, the leading columns that were dropped by `cache.drop`.
        other_groups: whether quantization groups differ from those of a row that is read alone.
        fewer_votes: whether a crop has removed queries that vote if the row is read alone; then
            only the numbers of kept tokens are equal.
    """

    cache: CompressedCache
    full: DynamicCache | None
    ids: Tensor
    pads: Tensor
    done: list[Part] = field(default_factory=list)
    turn: Part | None = None
    prompt_end: int | None = None
    logits: Tensor | None = None
    alone: list[tuple[CompressedCache, int] | None] = field(default_factory=list)
    short_by: int = 0
    resumed_at: int = 0
    dropped: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.bool))
    scored: dict[int, Tensor] = field(default_factory=dict)
    other_groups: bool = False
    fewer_votes: bool = False

    @property
    def dropped_by_now(self) -> Tensor:
        """The columns that were dropped by span, (R, tokens seen) bool."""
        return torch.nn.functional.pad(self.dropped, (0, self.seen - self.dropped.shape[1]))

    @property
    def seen(self) -> int:
        return self.ids.shape[1]

    def note_rows(self) -> None:
        """Record whether quantization groups differ from those of a row that is read alone."""
        self.other_groups |= bool(self.pads.any()) or (self.rows > 1 and bool(self.dropped.any()))

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    def mask(self, stop: int) -> Tensor:
        """Return the attention mask up to `stop`, (R, stop) int64, zero for padding."""
        return (torch.arange(stop) >= self.pads[:, None]).long()

    def positions(self, start: int, stop: int) -> Tensor:
        """Return the positions of the columns, (R, stop - start) int64."""
        return (torch.arange(start, stop) - self.pads[:, None]).clamp(min=0)

    def branch(self, cache: CompressedCache) -> "State":
        """Return a copy of this state for a copy of the cache."""
        return replace(
            self,
            cache=cache,
            full=copy.deepcopy(self.full),
            done=list(self.done),
            turn=copy.deepcopy(self.turn),
            alone=[None] * self.rows,
        )


class Judge:
    """Checks the caches of a sequence against rows read alone and against an oracle."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence, self.policy, self.options = sequence, sequence.policy, sequence.options
        self.model = small_model(sequence.model)
        self.evicts = isinstance(self.policy, EvictingPolicy)  # drops tokens after every pass
        self.recalls = self.options.get("recall") is not None  # turns see all that was seen
        self.forgets_states = states_of(self.model) is States.BEGIN_ANEW
        # Whether the end of a short turn votes with queries of what stands before it.
        self.looks_back = self.recalls or self.options.get("turns") == "compress"

    def new_cache(self) -> CompressedCache:
        """Return an empty cache with the policy and options of the sequence."""
        return CompressedCache(self.model, self.policy, **self.options)

    @property
    def _votes_choose_numbers(self) -> bool:
        """Whether the votes determine how many tokens are kept in total."""
        inner = [self.policy]
        while hasattr(inner[-1], "policy"):
            inner.append(inner[-1].policy)
        return any(isinstance(getattr(each, "budget", None), AutoBudget) for each in inner)

    def check(self, state: State) -> None:
        """Check what must hold for a cache at any time."""
        cache = state.cache
        seen = {layer.seen_tokens for layer in cache.prompt_state.layers}
        if seen != {state.seen}:
            raise WrongError(
                f"layers: expected all to have seen {state.seen} tokens, but got {seen}"
            )
        for layer in cache.prompt_state.layers:
            require_integrity(layer)
        report = cache.report()
        for layer, row in zip(cache.layers, report["layers"], strict=True):
            if row["kind"] != "compressed" or not state.seen:
                continue
            kept = cache.kept_positions(row["layer"])
            _require_positions(kept, self._tokens(state), row["layer"])
            _require_bytes(kept, layer, row, self.options)
        if report.held_bytes != sum(row["held_bytes"] for row in report["layers"]):
            raise WrongError("report: held_bytes is not the sum of the layers'")

    def judge(self, state: State, *, keeps: bool = True) -> None:
        """Check that every row equals the same row read alone."""
        state.note_rows()
        for row in range(state.rows):
            cache, logits = self._alone(state, row)
            if not state.fewer_votes:
                self._compare(state, f"row {row} alone", state.logits[row], logits[0])
            if keeps:
                self._compare_kept(state, row, cache)
        state.logits = None

    def _compare(self, state: State, judge: str, found: Tensor, expected: Tensor) -> None:
        tokens = min(len(found), len(expected))
        found, expected = found[-tokens:], expected[-tokens:]
        apart = float((found - expected).abs().max() / expected.abs().max())
        close = CLOSE
        if (bits := self._bits) is not None:
            other_groups = state.other_groups or judge == "oracle"
            close = (CLOSE_IN_BITS if other_groups else CLOSE_IN_GROUPS)[bits]
        if not apart <= close:
            raise WrongError(f"{judge}: logits are off by {apart:.2g} of the highest")

    def _compare_kept(self, state: State, row: int, alone: CompressedCache) -> None:
        if state.fewer_votes and any(part.kind == "spans" for part in state.done):
            return  # spans hold more or less of what was kept
        if self.options.get("quantize") and state.other_groups and len(state.done) > 1:
            return  # other neighbours share a scale, so votes differ by rounding
        totals = [0, 0]
        for layer in alone.compressed_layers:
            found = _sets(state.cache.kept_positions(layer)[row])
            expected = _sets(alone.kept_positions(layer)[0])
            most = max(len(found), len(expected))  # heads are stored per query head, or not yet
            found, expected = (
                [head for head in heads for _ in range(most // len(heads))]
                for heads in (found, expected)
            )
            if state.fewer_votes:
                counts = [sum(map(len, heads)) for heads in (found, expected)]
                totals = [total + count for total, count in zip(totals, counts, strict=True)]
                # Across layers, votes also choose which of them keeps how many.
                shares = self._votes_choose_numbers or isinstance(self.policy, AcrossLayers)
                alike = shares or counts[0] == counts[1]
            else:
                alike = found == expected
            if not alike:
                raise WrongError(f"row {row} alone: layer {layer}: {found} for {expected}")
        if totals[0] != totals[1] and not self._votes_choose_numbers:
            raise WrongError(f"row {row} alone: {totals[0]} tokens in all for {totals[1]}")

    def _alone(self, state: State, row: int) -> tuple[CompressedCache, Tensor]:
        """Return a cache that has read the row alone, and the logits of the last part."""
        cache, read = state.alone[row] or (self.new_cache(), 0)
        logits = torch.empty(0)
        for number in range(read, len(state.done)):
            part = state.done[number]
            try:
                logits = self._read_alone(cache, part, row, int(state.pads[row]))
            except SnapKVError as error:
                raise WrongError(f"row {row} alone is refused: {kind_of(error)}") from error
        state.alone[row] = (cache, len(state.done))
        return cache, logits

    def _read_alone(self, cache: CompressedCache, part: Part, row: int, pads: int) -> Tensor:
        if part.kind == "crop":
            cache.crop(part.stop - part.start)
            return torch.empty(0)
        if part.kind == "spans":
            cache.drop([span for span in part.ids[row].tolist() if span[0] < span[1]])
            return torch.empty(0)
        if part.kind == "turn":
            cache.expect_prompt((part.stop if part.end is None else part.end) - pads)
        logits, start = [], max(part.start, pads)
        for how, stop in self._passes_alone(part):
            if stop <= start:
                continue
            piece = part.ids[row : row + 1, start - part.start : stop - part.start]
            if how == "context":
                return last_logits_of(self.model, piece, cache)
            cache.expect_tokens(piece)
            logits.append(self.model(piece, past_key_values=cache).logits)
            start = stop
        return logits[-1] if len(logits) == 1 else torch.cat(logits, dim=1)

    def _passes_alone(self, part: Part) -> list[tuple[Any, ...]]:
        """Return one pass, unless the way of reading the turn changes what is kept."""
        matters = (self.evicts or self.forgets_states) and part.start > 0
        matters |= part.end != part.stop
        matters |= any(how == "context" for how, *_ in part.passes)
        if part.kind == "turn" and matters:
            return part.passes
        return [("call", part.stop)]

    def lost_votes(self, state: State) -> bool:
        """Return whether a crop removed queries that would have voted in the last turn."""
        wanted = self.policy.query_tokens
        if not (state.short_by and wanted):
            return False
        if wanted != ALL_QUERIES and not any(part.kind == "spans" for part in state.done):
            wanted = state.short_by  # as many stand before the crop, but for those that are dropped
        return state.seen - state.resumed_at < wanted

    # The oracle.

    def hidden(
        self, state: State, *, in_turn: bool | None = None, after: int | None = None
    ) -> dict[int, Tensor]:
        """Return the seen columns that the next pass will not see, by layer."""
        seen = state.cache.get_seq_length()
        in_turn = state.turn is not None if in_turn is None else in_turn
        if after is not None:
            in_turn = seen < after
        if not seen or state.full is None:
            return {}
        if self.recalls and in_turn:
            dropped = state.dropped_by_now[:, None]
            return dict.fromkeys(state.cache.compressed_layers, dropped) if dropped.any() else {}
        return hidden_columns(state.cache, seen, state.pads)

    def ask_oracle(
        self, state: State, hidden: dict[int, Tensor], start: int, logits: Tensor
    ) -> None:
        """Read the same tokens into the full cache of the oracle."""
        if not self._has_oracle(state):
            state.full = None
        if state.full is None:
            return
        expected = masked_pass(
            judge_of(self.sequence.model),
            state.full,
            hidden,
            state.ids[:, start:],
            state.mask(state.seen),
            state.positions(start, state.seen),
        )[:, -logits.shape[1] :]
        real = state.mask(state.seen)[:, -logits.shape[1] :].bool()
        if bool(real.any()):
            self._compare(state, "oracle", logits[real], expected[real])

    @property
    def _bits(self) -> str | None:
        """The name of the quantization, or None if nothing is quantized."""
        given = self.options.get("quantize")
        if isinstance(given, KVCodes):
            return "int8" if given.keys == given.values == 8 else "int4"
        return given

    def _has_oracle(self, state: State) -> bool:
        """Return whether the attention equals that of a full cache that hides evicted tokens."""
        if self._bits in ("int4", "K8V4"):
            return False  # rounding alone moves logits as far as a wrong token would
        return not (isinstance(self.policy, StreamingLLM) and not self.is_whole(state))

    def is_whole(self, state: State) -> bool:
        """Return whether no token was evicted, in any layer or row."""
        return len(self.whole_layers(state)) == len(state.cache.compressed_layers)

    def whole_layers(self, state: State) -> set[int]:
        """Return the layers in which no head of any row has evicted a token."""
        cache = state.cache
        dropped = state.dropped[:, : cache.get_seq_length()].sum(dim=-1)
        tokens = (self._tokens(state) - dropped)[:, None]
        return {
            layer
            for layer in cache.compressed_layers
            if not cache.get_seq_length()
            or bool(((cache.kept_positions(layer) >= 0).sum(dim=-1) == tokens).all())
        }

    def _tokens(self, state: State) -> Tensor:
        """Return the tokens that each row has read, (R,); padding counts in the first prompt."""
        has_read = any(part.kind not in CHANGES for part in state.done)
        in_first = not has_read and (state.turn is not None or state.prompt_end is None)
        return state.cache.get_seq_length() - (0 * state.pads if in_first else state.pads)


def _sets(kept: Tensor) -> list[set[int]]:
    """Return the positions of each head, (H, S), as sets; equal heads are listed once."""
    return [{position for position in head if position >= 0} for head in kept.tolist()]


def _require_positions(kept: Tensor, tokens: Tensor, layer: int) -> None:
    """Check that positions ascend without repetition after leading -1 and are of seen tokens."""
    steps = kept.diff(dim=-1)
    real = kept[..., :-1] >= 0
    wrong = bool(((steps <= 0) & real).any()) or bool((kept >= tokens[:, None, None]).any())
    if kept.shape[-1] and (wrong or bool((kept < -1).any())):
        raise WrongError(f"layer {layer}: expected ascending positions, but got {kept.tolist()}")


def _require_bytes(kept: Tensor, layer: Any, row: dict[str, Any], options: dict[str, Any]) -> None:
    """Check that the held bytes match the kept tokens; quantized layers are skipped."""
    if options.get("quantize"):
        return
    keys, values = layer.keys, layer.values
    size = keys.element_size() * (keys.shape[-1] + values.shape[-1])
    slots = kept.numel() if layer.store.kind == "dense" else int((kept >= 0).sum())
    beside = 0 if layer.state.sink_keys is None else layer.state.sink_keys.nbytes
    states = [layer.other_states.get(name, {}) for name in ("conv_states", "recurrent_states")]
    beside += sum(state.nbytes for each in states for state in each.values() if state is not None)
    if row["held_bytes"] != slots * size + beside:
        raise WrongError(
            f"layer {row['layer']}: expected {slots * size + beside} bytes of {slots} tokens, "
            f"got {row['held_bytes']}"
        )
