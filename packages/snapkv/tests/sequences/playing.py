"""Run a sequence and check the cache after every operation."""

import contextlib
import copy
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria

from snapkv import CompressedCache, SnapKVError
from snapkv.cache import layer_group
from snapkv.hf import append_buffers
from snapkv.policies.spans import Spans
from tests.hf.tape import recording_on_a_cpu
from tests.sequences import operations as do
from tests.sequences.judging import (
    CHANGES,
    Judge,
    Part,
    State,
    WrongError,
    judge_of,
    kind_of,
    last_logits_of,
    reading,
)

MOST_ROWS = 4

EQUAL, REFUSED, WRONG, ERROR = "equal", "refused by name", "wrong", "error without a name"


@dataclass(frozen=True)
class Verdict:
    """The result of running a sequence.

    Attributes:
        kind: one of the four above.
        said: one line for each thing that was wrong or refused.
    """

    kind: str
    said: tuple[str, ...] = ()


class RefusedError(Exception):
    """Raised if an operation was refused with a SnapKVError and changed nothing."""


@torch.no_grad()
def play(sequence: do.Sequence) -> Verdict:
    """Run all operations of a sequence and return the verdict."""
    refused: list[str] = []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # files that vanish
    try:
        with (
            tempfile.TemporaryDirectory(dir=memory) as folder,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(layer_group, "MOST_BYTES", {"cpu": sequence.waiting_bytes})
            try:
                game = Game(sequence, Path(folder))
            except SnapKVError as error:
                return Verdict(REFUSED, (kind_of(error),))
            for operation in sequence.operations:
                with _noting(refused):
                    game.apply(operation)
                game.judge.check(game.state)
            game.finish(refused)
    except WrongError as error:
        return Verdict(WRONG, (str(error),))
    except Exception:  # whatever it is, it has no name
        return Verdict(ERROR, (traceback.format_exc(limit=-2),))
    return Verdict(REFUSED if refused else EQUAL, tuple(refused))


@contextlib.contextmanager
def _noting(refused: list[str]) -> Iterator[None]:
    try:
        yield
    except RefusedError as error:
        refused.append(str(error))


class Game:
    """A sequence while it runs, with the states of its caches."""

    def __init__(self, sequence: do.Sequence, folder: Path) -> None:
        self.sequence, self.folder = sequence, folder
        self.judge = Judge(sequence)
        self.model, self.options = self.judge.model, sequence.options
        self.state = self._emptied(self.judge.new_cache())
        self.others: list[State] = []
        self.drawn = 0

    def _emptied(self, cache: CompressedCache) -> State:
        full = DynamicCache(config=judge_of(self.sequence.model).config)
        ids = torch.empty(0, 0, dtype=torch.int64)
        return State(cache=cache, full=full, ids=ids, pads=torch.empty(0, dtype=torch.int64))

    def apply(self, operation: do.Operation) -> None:
        """Apply one operation; skip it if it is not possible in the current state."""
        if self._wants_context and getattr(operation, "how", "") != "context":
            return
        if self.state.rows or isinstance(operation, do.Turn | do.Begin | do.Reset | do.Save):
            getattr(self, f"_{type(operation).__name__.lower()}")(operation)

    @property
    def _wants_context(self) -> bool:
        """Whether nothing can be read before a context, which may have been refused."""
        return self.sequence.policy.needs_reconstruction_pass and not self.state.seen

    # Reading.

    def _turn(self, turn: do.Turn) -> None:
        self._rows_for(turn)
        if turn.how == "call":
            self._feed(turn.tokens)
            return
        end = self._announce(turn.tokens, tells=turn.how != "generate")
        left = end - self.state.seen
        if turn.how == "pieces":
            while self.state.seen < end:
                self._feed(min(turn.piece, end - self.state.seen))
        elif turn.how == "layers":
            self._feed(left, "layers", turn.piece)
        elif turn.how == "context":
            self._feed(left, "context")
        elif turn.how == "generate":
            self._generate(end, turn)
        else:
            self._feed(left)

    def _begin(self, begin: do.Begin) -> None:
        self._rows_for(begin)
        end = self._announce(max(begin.of, begin.tokens + 1), tells=True)
        self._feed(min(begin.tokens, end - self.state.seen))

    def _step(self, step: do.Step) -> None:
        if step.together:
            self._feed(step.tokens)
            return
        for _ in range(step.tokens):
            self._feed(1)

    def _rows_for(self, reading: do.Turn | do.Begin) -> None:
        """A first prompt says how many rows there are, and how long they are."""
        if not self.state.seen:
            most = (reading.tokens if isinstance(reading, do.Turn) else reading.of) - 1
            pads = torch.tensor([min(pads, most) for pads in reading.pads])
            self.state.ids, self.state.pads = torch.zeros(len(pads), 0, dtype=torch.int64), pads
            self.state.alone = [None] * len(pads)
            self.state.dropped = torch.zeros(len(pads), 0, dtype=torch.bool)
            if self.state.turn is not None:  # announced, and refused
                self.state.turn.ids = self.state.ids

    def _announce(self, tokens: int, *, tells: bool) -> int:
        """Where the next turn ends, which the cache is told; an open one ends where it was to."""
        state = self.state
        if state.turn is not None and state.turn.end is not None:
            return state.turn.end
        end = state.seen + tokens
        if tells:
            self._unless_refused(lambda: state.cache.expect_prompt(end))
            self._open(end)
        return end

    def _open(self, end: int) -> None:
        """The next tokens belong to a turn that ends there."""
        state = self.state
        if state.turn is None:
            state.turn = Part("turn", state.seen, state.seen, state.ids[:, :0])
        state.turn.end = state.prompt_end = end

    def _feed(self, tokens: int, how: str = "call", piece: int = 0) -> None:
        """Read new tokens in one plain call."""
        state = self.state
        if state.turn is None and not state.seen:
            state.turn = Part("turn", 0, 0, state.ids)
        if state.turn is not None and state.turn.end is not None:
            tokens = min(tokens, state.turn.end - state.seen)
        elif not state.seen:
            tokens = max(tokens, int(state.pads.max()) + 1)
        ids, start = self._draw(tokens), state.seen
        stop = start + ids.shape[1]
        hidden = self.judge.hidden(state)

        def read() -> Tensor:
            if how == "context":
                return last_logits_of(self.model, ids, state.cache)
            state.cache.expect_tokens(ids)
            mask = state.mask(stop) if bool(state.pads.any()) else None
            with reading(self.model, how, piece):
                return self.model(
                    ids,
                    attention_mask=mask,
                    position_ids=state.positions(start, stop),
                    past_key_values=state.cache,
                ).logits

        logits = self._unless_refused(read)
        state.ids = torch.cat([state.ids, ids], dim=1)
        self.judge.ask_oracle(state, hidden, start, logits)
        if state.turn is not None and state.turn.end is None:
            state.turn.end = state.prompt_end = stop
        self._took(start, logits, how)

    def _took(self, start: int, logits: Tensor, how: str, *, keeps: bool = True) -> None:
        """Record a pass and check every part that it has finished."""
        state = self.state
        if state.turn is None:
            state.done.append(Part("step", start, state.seen, state.ids[:, start:]))
            state.logits = logits
            self.judge.judge(state)
            return
        state.turn.passes.append((how, state.seen))
        state.turn.ids = torch.cat([state.turn.ids, state.ids[:, state.turn.stop :]], dim=1)
        state.turn.stop = state.seen
        before = state.logits
        state.logits = logits if before is None else torch.cat([before, logits], dim=1)
        if state.seen == state.turn.end:
            state.fewer_votes |= self.judge.lost_votes(state)
            state.done.append(state.turn)
            state.turn = None
            self.judge.judge(state, keeps=keeps)

    def _generate(self, end: int, turn: do.Turn) -> None:
        """Run `generate`; its result counts as a turn and then decode steps."""
        state, start = self.state, self.state.seen
        ids = torch.cat([state.ids, self._draw(end - start)], dim=1)
        watched = _Watch(lambda: self.judge.hidden(state, after=end))
        hidden = self.judge.hidden(state, in_turn=True)
        piece = turn.piece
        options = {"prefill_chunk_size": piece} if piece else {}
        output = self._unless_refused(
            lambda: self._generated(
                ids,
                attention_mask=state.mask(end),
                past_key_values=state.cache,
                max_new_tokens=turn.answer,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
                stopping_criteria=[watched],
                **options,
            )
        )
        self._open(end)
        state.ids = ids
        if turn.piece and (self.judge.evicts or self.judge.forgets_states):
            state.full = None
        self.judge.ask_oracle(state, hidden, start, output.logits[0][:, None])
        stops = list(range(start + piece, end, piece)) if piece else []
        state.turn.passes += [("call", stop) for stop in stops]
        last, state.logits = len(output.logits) - 1, None
        self._took(start, output.logits[0][:, None], "call", keeps=not last)
        for number, logits in enumerate(output.logits[1:]):
            state.ids = output.sequences[:, : end + number + 1]
            self.judge.ask_oracle(state, watched.seen[number], end + number, logits[:, None])
            state.done.append(Part("step", end + number, state.seen, state.ids[:, end + number :]))
            state.logits = logits[:, None]
            self.judge.judge(state, keeps=number + 1 == last)

    def _generated(self, ids: Tensor, **options: Any) -> Any:
        if not self.sequence.recorded:
            return self.model.generate(ids, disable_compile=True, **options)
        with recording_on_a_cpu(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(append_buffers, "LEAST_TOKENS", 1)
            patch.setattr(append_buffers, "FIRST_TOKENS", 2)
            return self.model.generate(ids, **options)

    def _draw(self, tokens: int) -> Tensor:
        self.drawn += 1
        generator = torch.Generator().manual_seed(self.drawn)
        return torch.randint(3, 64, (self.state.rows, tokens), generator=generator)

    # What changes the cache in other ways.

    def _crop(self, crop: do.Crop) -> None:
        state = self.state
        count = min(crop.tokens, state.seen - int(state.pads.max()) - 1)
        if count <= 0:
            return
        nothing_dropped, before = self.judge.is_whole(state), self.judge.whole_layers(state)
        self._unless_refused(lambda: state.cache.crop(-count))
        after = self.judge.whole_layers(state)
        if after - before and len(after) < len(state.cache.compressed_layers):
            raise WrongError(
                f"crop: expected to recall all layers or none, but got {after - before}"
            )
        left = state.seen - count
        if state.full is not None:
            try:
                state.full.crop(-count)
            except RuntimeError:
                state.full = None  # transformers' own layers refuse what ours did not
        into_turn = state.prompt_end is None or left < state.prompt_end
        state.other_groups |= into_turn  # what is left was encoded with what is gone
        if state.prompt_end is not None and left < state.prompt_end <= state.seen:
            state.prompt_end = None  # what was to come and is not there yet stays announced
        open_turn = state.turn
        state.ids, state.alone, state.logits = state.ids[:, :left], [None] * state.rows, None
        reads_again = into_turn and (
            self.judge.recalls or (open_turn is not None and nothing_dropped)
        )
        stays = any(part.kind in CHANGES and part.stop > left for part in state.done)
        state.dropped = state.dropped_by_now[:, :left]
        if not stays and (reads_again or not into_turn):
            self._cut(left, is_open=into_turn, count=count)
        else:
            if open_turn is not None and open_turn.stop > open_turn.start:
                state.done.append(open_turn)
            nothing = state.ids[:, :0]
            state.done.append(Part("crop", left + count, left, nothing))
            state.turn = None
            if into_turn:
                state.turn = Part("turn", left, left, nothing, end=state.prompt_end)

    def _drop(self, drop: do.Drop) -> None:
        state, own = self.state, self.state.seen - self.state.pads
        tokens = own if drop.shift else own.amin().expand(state.rows)
        spans = [
            [[min(place + row * drop.shift, most) for place in span] for span in drop.spans]
            for row, most in enumerate(tokens.tolist())
        ]
        real = [[span for span in row if span[0] < span[1]] for row in spans]
        given = real if drop.shift else real[0]
        self._unless_refused(lambda: state.cache.drop(given))
        places = torch.arange(state.seen) - state.pads[:, None]
        covered = [Spans.of("spans", own).cover(row) for own, row in zip(real, places, strict=True)]
        state.dropped = state.dropped_by_now | torch.stack(covered)
        state.done.append(Part("spans", state.seen, state.seen, torch.tensor(spans)))
        state.logits = None

    def _cut(self, left: int, *, is_open: bool, count: int) -> None:
        """Nothing behind that column was ever read; an open turn goes on with the next pass."""
        state = self.state
        parts = [*state.done, *([] if state.turn is None else [state.turn])]
        if is_open or self.judge.looks_back:
            held_again = left + count - state.resumed_at
            state.short_by = max(0, state.short_by - held_again) + count
            state.resumed_at = left
        while parts and parts[-1].start >= left and parts[-1].kind not in CHANGES:
            parts.pop()
        state.turn = None
        if parts and parts[-1].stop > left and parts[-1].kind not in CHANGES:
            last = parts[-1]
            passes = [each for each in last.passes if each[1] < left]
            passes += [("call", left)] if last.kind == "turn" else []
            ids = last.ids[:, : left - last.start]
            parts[-1] = replace(last, stop=left, ids=ids, passes=passes)
            if is_open and last.kind == "turn":
                state.turn = parts.pop()
        if is_open:
            turn = state.turn or Part("turn", left, left, state.ids[:, :0])
            state.turn = replace(turn, end=state.prompt_end)
        state.done = parts

    def _rows(self, taken: do.Rows) -> None:
        state, numbers = self.state, torch.tensor(taken.numbers)
        given, order = numbers % state.rows, numbers % state.rows
        if taken.how == "batch_repeat_interleave":
            given = taken.numbers[0]
            if state.rows * given > MOST_ROWS:
                return
            order = torch.arange(state.rows).repeat_interleave(given)
        elif taken.how == "reorder_cache":
            given = order = torch.tensor((taken.numbers * state.rows)[: state.rows]) % state.rows
        self._unless_refused(lambda: getattr(state.cache, taken.how)(given))
        state.dropped = state.dropped_by_now[order]
        state.ids, state.pads, state.logits = state.ids[order], state.pads[order], None
        state.done = [replace(part, ids=part.ids[order]) for part in state.done]
        if state.turn is not None:
            state.turn.ids = state.turn.ids[order]
        places = order.tolist()
        state.alone = [
            state.alone[place] if place not in places[:number] else None
            for number, place in enumerate(places)
        ]
        for layer in [] if state.full is None else state.full.layers:
            _take_rows(layer, order)

    def _copy(self, operation: do.Copy) -> None:
        copies = copy.deepcopy if operation.deep else copy.copy
        other = self.state.branch(self._unless_refused(lambda: copies(self.state.cache)))
        if operation.go_on == "copy":
            other, self.state = self.state, other
        self.others.append(other)

    def _swap(self, _: do.Swap) -> None:
        if self.others:
            self.state, self.others[-1] = self.others[-1], self.state

    def _save(self, _: do.Save) -> None:
        path = self.folder / "cache.safetensors"
        self._unless_refused(lambda: self.state.cache.save(path))
        before = _seen_of(self.state.cache)
        try:
            self.state.cache = CompressedCache.load(path, self.model)
        except SnapKVError as error:
            raise WrongError(f"load: what was saved is refused: {kind_of(error)}") from error
        if not _same(_seen_of(self.state.cache), before):
            raise WrongError("load: other tokens than were saved")

    def _reset(self, _: do.Reset) -> None:
        self._unless_refused(self.state.cache.reset)
        self.state = self._emptied(self.state.cache)

    def _unless_refused(self, change: Callable[[], Any]) -> Any:
        """Return the result of the change; if it is refused, check that it changed nothing."""
        before = _seen_of(self.state.cache)
        try:
            return change()
        except SnapKVError as error:
            if not _same(_seen_of(self.state.cache), before):
                raise WrongError(f"changed by what it refuses: {kind_of(error)}") from error
            raise RefusedError(kind_of(error)) from error

    def finish(self, refused: list[str]) -> None:
        """Let every cache generate more tokens and check it."""
        for state in [self.state, *self.others]:
            self.state = state
            if state.rows and not self._wants_context:
                with _noting(refused):
                    self._feed(1)
                self.judge.check(self.state)


class _Watch(StoppingCriteria):
    """A stopping criterion that records after every pass what is hidden from the next one."""

    def __init__(self, ask: Callable[[], dict[int, Tensor]]) -> None:
        self.ask, self.seen = ask, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(self.ask())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _seen_of(cache: CompressedCache) -> list[tuple[int, Tensor]]:
    """Return the seen tokens and kept positions of every layer."""
    return [
        (row["seen_tokens"], cache.kept_positions(row["layer"]))
        if row["kind"] == "compressed"
        else (row["seen_tokens"], torch.empty(0))
        for row in cache.report()["layers"]
    ]


def _same(one: list[tuple[int, Tensor]], other: list[tuple[int, Tensor]]) -> bool:
    return all(
        seen == told and (torch.equal(kept, had) or not (kept.numel() or had.numel()))
        for (seen, kept), (told, had) in zip(one, other, strict=True)
    )


def _take_rows(layer: Any, order: Tensor) -> None:
    """Select rows of a cache layer of transformers in place."""
    for name in ("keys", "values", "conv_states", "recurrent_states"):
        held = getattr(layer, name, None)
        if isinstance(held, Tensor) and held.ndim > 1:
            setattr(layer, name, held[order])
        elif isinstance(held, dict):
            setattr(
                layer, name, {key: part[order] for key, part in held.items() if part is not None}
            )
