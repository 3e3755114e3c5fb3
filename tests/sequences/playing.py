"""A sequence is played, and judged after every operation.

Each row is read again alone: with no pads, its turns at once, without copies, files or other rows,
and without what was cropped. It must keep the same positions and give the same logits. An oracle
reads the batch into transformers' own cache, whose attention is masked to what the cache keeps.
"""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria

from snapkv import (
    AutoBudget,
    CompressedCache,
    DuoAttention,
    PageRecall,
    ScoreThreshold,
    SnapKVError,
    StreamingLLM,
)
from snapkv.policies import EvictingPolicy
from snapkv.policies.base import ALL_QUERIES
from snapkv.prefill import chunked, layer_by_layer
from tests.oracle import hidden_columns, masked_pass
from tests.sequences.models import VOCABULARY, judge_of, small_model
from tests.sequences.operations import (
    Begin,
    Copy,
    Crop,
    Operation,
    Reorder,
    Repeat,
    Reset,
    Save,
    Select,
    Sequence,
    Step,
    Swap,
    Turn,
)

CLOSE = 2e-3
"""How far logits may be apart, as a part of the highest of them; float32 sums make it 1e-4."""
CLOSE_IN_BITS = {"int8": 0.15, "fp8": 0.7, "int4": 0.7}
MOST_ROWS = 4

EQUAL, REFUSED, WRONG, ERROR = "equal", "refused by name", "wrong", "error without a name"


@dataclass(frozen=True)
class Verdict:
    """What became of a sequence.

    Attributes:
        kind: one of the four above.
        said: what was wrong or refused, one line each.
        at: how many operations had been done by then.
    """

    kind: str
    said: tuple[str, ...] = ()
    at: int = 0


class WrongError(Exception):
    """The cache is not as it must be."""


class RefusedError(Exception):
    """An operation was refused by name, and nothing was changed by it."""


@dataclass
class Part:
    """A part of what was read: a turn, a step, or a crop that is to be done alone, too.

    Attributes:
        kind: "turn", "step" or "crop".
        start: column of its first token; of a crop, tokens seen before.
        stop: column behind the last one that was read; of a crop, tokens seen after.
        ids: (R, stop - start), what was read.
        end: of a turn, where it will end; None where the next pass will tell.
        passes: of a turn, how it was read: the function's name, up to which column, numbers.
        short_by: queries that a crop took from those that vote at the end.
        resumed_at: tokens seen after that crop.
    """

    kind: str
    start: int
    stop: int
    ids: Tensor
    end: int | None = None
    passes: list[tuple[Any, ...]] = field(default_factory=list)
    short_by: int = 0
    resumed_at: int = 0


@dataclass
class State:
    """A cache and all that was done to it.

    Attributes:
        cache: the one that is judged.
        full: the oracle's, or None where it cannot follow.
        ids: (R, tokens seen).
        pads: (R,) leading columns of each row that are none of its tokens.
        done: what was read, but for the turn that is open.
        turn: the turn that is open, or None.
        prompt_end: as the cache was told, or None.
        logits: (R, N, V) of the last N columns of the turn that is open.
        alone: for each row a cache that has read it alone, and how many parts; None until asked.
        fewer_votes: whether a crop has taken queries that have voted alone; then only the numbers
            of kept tokens are alike.
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
    fewer_votes: bool = False

    @property
    def seen(self) -> int:
        """Columns that were read."""
        return self.ids.shape[1]

    @property
    def rows(self) -> int:
        """R."""
        return self.ids.shape[0]

    def mask(self, stop: int) -> Tensor:
        """(R, stop) int64, zero for pads."""
        return (torch.arange(stop) >= self.pads[:, None]).long()

    def positions(self, start: int, stop: int) -> Tensor:
        """(R, stop - start) int64."""
        return (torch.arange(start, stop) - self.pads[:, None]).clamp(min=0)

    def branch(self, cache: CompressedCache) -> "State":
        """The same for a copy of the cache."""
        return replace(
            self,
            cache=cache,
            full=copy.deepcopy(self.full),
            done=list(self.done),
            turn=copy.deepcopy(self.turn),
            alone=[None] * self.rows,
        )


@torch.no_grad()
def play(sequence: Sequence) -> Verdict:
    """Do all of a sequence and say what became of it."""
    refused: list[str] = []
    number = 0
    try:
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            try:
                game = Game(sequence, Path(folder))
            except SnapKVError as error:
                return Verdict(REFUSED, (_kind(error),))
            for operation in sequence.operations:
                with _noting(refused):
                    game.do(operation)
                game.check()
                number += 1
            game.finish(refused)
    except WrongError as error:
        return Verdict(WRONG, (str(error),), number)
    except Exception as error:  # whatever it is, it has no name
        where = error.__traceback__
        while where.tb_next is not None:
            where = where.tb_next
        line = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}"
        text = str(error).splitlines()[0] if str(error) else ""
        return Verdict(ERROR, (f"{type(error).__name__} at {line}: {text[:160]}",), number)
    return Verdict(REFUSED if refused else EQUAL, tuple(refused), number)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # files that vanish


@contextlib.contextmanager
def _noting(refused: list[str]) -> Iterator[None]:
    try:
        yield
    except RefusedError as error:
        refused.append(str(error))


def _kind(error: SnapKVError) -> str:
    """What kind of refusal it is: the argument, what was expected, without numbers and names."""
    return f"{type(error).__name__}: {str(error).partition(', got ')[0]}"


class Game:
    """A sequence that is being played."""

    def __init__(self, sequence: Sequence, folder: Path) -> None:
        self.sequence, self.folder = sequence, folder
        self.model, self.policy = small_model(sequence.model), sequence.policy
        self.options = dict(sequence.options)
        self.state = self._emptied(self._new_cache())
        self.others: list[State] = []
        self.drawn = 0

    def _new_cache(self) -> CompressedCache:
        return CompressedCache(self.model, self.policy, **self.options)

    def _emptied(self, cache: CompressedCache) -> State:
        full = DynamicCache(config=judge_of(self.sequence.model).config)
        ids = torch.empty(0, 0, dtype=torch.int64)
        return State(cache=cache, full=full, ids=ids, pads=torch.empty(0, dtype=torch.int64))

    @property
    def evicts(self) -> bool:
        """Whether the policy drops tokens after every pass."""
        return isinstance(self.policy, EvictingPolicy)

    @property
    def recalls(self) -> bool:
        """Whether turns are read over all that was seen."""
        return self.options.get("recall") is not None

    @property
    def _votes_choose_numbers(self) -> bool:
        """Whether it depends on votes how many tokens a layer keeps."""
        inner = [self.policy]
        while hasattr(inner[-1], "policy"):
            inner.append(inner[-1].policy)
        kinds = ScoreThreshold | DuoAttention
        return any(isinstance(each, kinds) for each in inner) or any(
            isinstance(getattr(each, "budget", None), AutoBudget) for each in inner
        )

    def do(self, operation: Operation) -> None:
        """Do one operation; what makes no sense now is left out."""
        if not self.state.rows and not isinstance(operation, Turn | Begin | Reset | Save):
            return
        self._DO[type(operation)](self, operation)

    # Reading.

    def _turn(self, turn: Turn) -> None:
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
        elif turn.how == "chunked":
            self._feed(left, "chunked", turn.piece, turn.cap)
        elif turn.how == "generate":
            self._generate(end, turn)
        else:
            self._feed(left)

    def _begin(self, begin: Begin) -> None:
        self._rows_for(begin)
        end = self._announce(max(begin.of, begin.tokens + 1), tells=True)
        self._feed(min(begin.tokens, end - self.state.seen))

    def _step(self, step: Step) -> None:
        if step.together:
            self._feed(step.tokens)
            return
        for _ in range(step.tokens):
            self._feed(1)

    def _rows_for(self, reading: Turn | Begin) -> None:
        """A first prompt says how many rows there are, and how long they are."""
        if not self.state.seen:
            most = (reading.tokens if isinstance(reading, Turn) else reading.of) - 1
            pads = torch.tensor([min(pads, most) for pads in reading.pads])
            self.state.ids, self.state.pads = torch.zeros(len(pads), 0, dtype=torch.int64), pads
            self.state.alone = [None] * len(pads)
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

    def _feed(self, tokens: int, how: str = "call", *numbers: int) -> None:
        """One plain call with tokens that nobody has seen."""
        state = self.state
        if state.turn is None and not state.seen:
            state.turn = Part("turn", 0, 0, state.ids)
        if state.turn is not None and state.turn.end is not None:
            tokens = min(tokens, state.turn.end - state.seen)
        elif not state.seen:
            tokens = max(tokens, int(state.pads.max()) + 1)
        ids, start = self._draw(tokens), state.seen
        stop = start + tokens
        hidden = self._hidden()

        def read() -> Tensor:
            state.cache.expect_tokens(ids)
            mask = state.mask(stop) if bool(state.pads.any()) else None
            with self._reading(how, *numbers):
                return self.model(
                    ids,
                    attention_mask=mask,
                    position_ids=state.positions(start, stop),
                    past_key_values=state.cache,
                ).logits

        logits = self._unless_refused(read)
        state.ids = torch.cat([state.ids, ids], dim=1)
        self._ask_oracle(hidden, start, logits, exact=how != "chunked")
        if state.turn is not None and state.turn.end is None:
            state.turn.end = state.prompt_end = stop
        self._took(start, logits, how, *numbers)

    def _reading(self, how: str, *numbers: int) -> contextlib.AbstractContextManager[None]:
        if how == "layers":
            return layer_by_layer(self.model, chunk_tokens=numbers[0])
        if how == "chunked":
            return chunked(self.model, chunk_tokens=numbers[0], cap_tokens=numbers[1])
        return contextlib.nullcontext()

    def _took(
        self, start: int, logits: Tensor, how: str, *numbers: int, keeps: bool = True
    ) -> None:
        """Note a pass, and judge what has come to its end."""
        state = self.state
        if state.turn is None:
            state.done.append(Part("step", start, state.seen, state.ids[:, start:]))
            state.logits = logits
            self._judge()
            return
        state.turn.passes.append((how, state.seen, *numbers))
        state.turn.ids = torch.cat([state.turn.ids, state.ids[:, state.turn.stop :]], dim=1)
        state.turn.stop = state.seen
        whole = how != "chunked" and state.logits is not None
        state.logits = torch.cat([state.logits, logits], dim=1) if whole else logits
        if state.seen == state.turn.end:
            if state.turn.short_by and self.policy.query_tokens:
                state.fewer_votes |= self._lost_votes(state.turn)
            state.done.append(state.turn)
            state.turn = None
            self._judge(keeps=keeps)

    def _lost_votes(self, turn: Part) -> bool:
        """Whether queries that a crop took would have voted at the end of a turn."""
        wanted = self.policy.query_tokens
        if wanted != ALL_QUERIES and self.options.get("storage") != "static":
            wanted = turn.short_by  # as many stand before the crop
        return turn.stop - turn.resumed_at < wanted

    def _generate(self, end: int, turn: Turn) -> None:
        """`generate`; an answer is a turn and then steps."""
        state, start = self.state, self.state.seen
        ids = torch.cat([state.ids, self._draw(end - start)], dim=1)
        watched = _Watch(lambda: self._hidden(after=end))
        hidden = self._hidden(in_turn=True)
        options = {"prefill_chunk_size": turn.piece} if turn.piece else {}
        output = self._unless_refused(
            lambda: self.model.generate(
                ids,
                attention_mask=state.mask(end),
                past_key_values=state.cache,
                max_new_tokens=turn.answer,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
                disable_compile=True,
                stopping_criteria=[watched],
                **options,
            )
        )
        self._open(end)
        state.ids = ids
        if turn.piece and self.evicts:
            state.full = None
        self._ask_oracle(hidden, start, output.logits[0][:, None], exact=True)
        stops = list(range(start + turn.piece, end, turn.piece)) if turn.piece else []
        state.turn.passes += [("call", stop) for stop in stops]
        last, state.logits = len(output.logits) - 1, None
        self._took(start, output.logits[0][:, None], "call", keeps=not last)
        for number, logits in enumerate(output.logits[1:]):
            state.ids = output.sequences[:, : end + number + 1]
            self._ask_oracle(watched.seen[number], end + number, logits[:, None], exact=True)
            state.done.append(Part("step", end + number, state.seen, state.ids[:, end + number :]))
            state.logits = logits[:, None]
            self._judge(keeps=number + 1 == last)

    def _draw(self, tokens: int) -> Tensor:
        self.drawn += 1
        generator = torch.Generator().manual_seed(self.drawn)
        return torch.randint(3, VOCABULARY, (self.state.rows, tokens), generator=generator)

    # What changes the cache in other ways.

    def _crop(self, crop: Crop) -> None:
        state = self.state
        count = min(crop.tokens, state.seen - int(state.pads.max()) - 1)
        if count <= 0:
            return
        nothing_dropped, before = self._is_whole(), self._whole_layers()
        self._unless_refused(lambda: state.cache.crop(-count))
        after = self._whole_layers()
        if after - before and len(after) < len(state.cache.compressed_layers):
            raise WrongError(f"crop: expected to recall all layers or none, got {after - before}")
        left = state.seen - count
        if state.full is not None:
            try:
                state.full.crop(-count)
            except RuntimeError:
                state.full = None  # transformers' own layers refuse what ours did not
        into_turn = state.prompt_end is None or left < state.prompt_end
        if state.prompt_end is not None and left < state.prompt_end <= state.seen:
            state.prompt_end = None  # what was to come and is not there yet stays announced
        open_turn = state.turn
        state.ids, state.alone, state.logits = state.ids[:, :left], [None] * state.rows, None
        reads_again = into_turn and (self.recalls or (open_turn is not None and nothing_dropped))
        stays = bool(state.done) and state.done[-1].kind == "crop" and state.done[-1].stop > left
        if not stays and (reads_again or not (into_turn or self.options.get("refresh_every"))):
            self._cut(left, is_open=into_turn, count=count)
        else:
            if open_turn is not None and open_turn.stop > open_turn.start:
                state.done.append(open_turn)
            nothing = state.ids[:, :0]
            state.done.append(Part("crop", left + count, left, nothing))
            state.turn = None
            if into_turn:
                state.turn = Part("turn", left, left, nothing, end=state.prompt_end)

    def _cut(self, left: int, *, is_open: bool, count: int) -> None:
        """Nothing behind that column was ever read; an open turn goes on with the next pass."""
        state = self.state
        parts = [*state.done, *([] if state.turn is None else [state.turn])]
        short_by = count + (0 if state.turn is None else state.turn.short_by)
        while parts and parts[-1].start >= left and parts[-1].kind != "crop":
            parts.pop()
        state.turn = None
        if parts and parts[-1].stop > left and parts[-1].kind != "crop":
            last = parts[-1]
            passes = [each for each in last.passes if each[1] < left]
            passes += [("call", left)] if last.kind == "turn" else []
            ids = last.ids[:, : left - last.start]
            parts[-1] = replace(last, stop=left, ids=ids, passes=passes)
            if is_open and last.kind == "turn":
                state.turn = parts.pop()
        if is_open:
            turn = state.turn or Part("turn", left, left, state.ids[:, :0])
            end = state.prompt_end
            state.turn = replace(turn, end=end, short_by=short_by, resumed_at=left)
        state.done = parts

    def _repeat(self, repeat: Repeat) -> None:
        if self.state.rows * repeat.times <= MOST_ROWS:
            order = torch.arange(self.state.rows).repeat_interleave(repeat.times)
            self._map_rows(lambda cache: cache.batch_repeat_interleave(repeat.times), order)

    def _select(self, select: Select) -> None:
        order = torch.tensor(select.rows) % self.state.rows
        self._map_rows(lambda cache: cache.batch_select_indices(order), order)

    def _reorder(self, reorder: Reorder) -> None:
        rows = self.state.rows
        order = torch.tensor((reorder.rows * rows)[:rows]) % rows
        self._map_rows(lambda cache: cache.reorder_cache(order), order)

    def _map_rows(self, change: Callable[[Any], None], order: Tensor) -> None:
        state = self.state
        self._unless_refused(lambda: change(state.cache))
        state.ids, state.pads, state.logits = state.ids[order], state.pads[order], None
        state.done = [replace(part, ids=part.ids[order]) for part in state.done]
        if state.turn is not None:
            state.turn.ids = state.turn.ids[order]
        places = order.tolist()
        state.alone = [
            state.alone[place] if place not in places[:number] else None
            for number, place in enumerate(places)
        ]
        if state.full is not None:
            for layer in state.full.layers:
                _take_rows(layer, order)

    def _copy(self, operation: Copy) -> None:
        copies = copy.deepcopy if operation.deep else copy.copy
        other = self.state.branch(self._unless_refused(lambda: copies(self.state.cache)))
        if operation.go_on == "copy":
            other, self.state = self.state, other
        self.others.append(other)

    def _swap(self, swap: Swap) -> None:
        del swap
        if self.others:
            self.state, self.others[-1] = self.others[-1], self.state

    def _save(self, save: Save) -> None:
        del save
        path = self.folder / "cache.safetensors"
        self._unless_refused(lambda: self.state.cache.save(path))
        before, options = _seen_of(self.state.cache), {}
        if isinstance(self.options.get("recall"), PageRecall):
            options["recall"] = self.options["recall"]
        try:
            self.state.cache = CompressedCache.load(path, self.model, **options)
        except SnapKVError as error:
            raise WrongError(f"load: what was saved is refused: {_kind(error)}") from error
        if not _same(_seen_of(self.state.cache), before):
            raise WrongError("load: other tokens than were saved")

    def _reset(self, reset: Reset) -> None:
        del reset
        self._unless_refused(self.state.cache.reset)
        self.state = self._emptied(self.state.cache)

    _DO: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Turn: _turn,
        Begin: _begin,
        Step: _step,
        Crop: _crop,
        Repeat: _repeat,
        Select: _select,
        Reorder: _reorder,
        Copy: _copy,
        Swap: _swap,
        Save: _save,
        Reset: _reset,
    }

    def _unless_refused(self, change: Callable[[], Any]) -> Any:
        """What the change gives; refused, it must have left everything as it was."""
        before = _seen_of(self.state.cache)
        try:
            return change()
        except SnapKVError as error:
            if not _same(_seen_of(self.state.cache), before):
                raise WrongError(
                    f"changed by what it refuses: {_kind(error)}: {_tokens(before)} became "
                    f"{_tokens(_seen_of(self.state.cache))}"
                ) from error
            raise RefusedError(_kind(error)) from error

    def finish(self, refused: list[str]) -> None:
        """Let every cache go on with what it has."""
        for state in [self.state, *self.others]:
            self.state = state
            if state.rows:
                with _noting(refused):
                    self._feed(1)
                self.check()

    # Judging.

    def check(self) -> None:
        """What holds at any time."""
        state = self.state
        cache = state.cache
        seen = {layer.seen_tokens for layer in cache.reading.layers}
        if seen != {state.seen}:
            raise WrongError(f"layers: expected all to have seen {state.seen} tokens, got {seen}")
        report = cache.report()
        for layer, row in zip(cache.layers, report["layers"], strict=True):
            if row["kind"] != "compressed" or not state.seen:
                continue
            kept = cache.kept_positions(row["layer"])
            _require_positions(kept, self._tokens, row["layer"])
            _require_bytes(kept, layer, row, self.options)
        if report.held_bytes != sum(row["held_bytes"] for row in report["layers"]):
            raise WrongError("report: held_bytes is not the sum of the layers'")

    def _judge(self, *, keeps: bool = True) -> None:
        """Every row is as it is alone."""
        state = self.state
        for row in range(state.rows):
            cache, logits = self._alone(row)
            if not state.fewer_votes:
                self._compare(f"row {row} alone", state.logits[row], logits[0])
            if keeps:
                self._compare_kept(row, cache)
        state.logits = None

    def _compare(self, judge: str, found: Tensor, expected: Tensor) -> None:
        tokens = min(len(found), len(expected))
        found, expected = found[-tokens:], expected[-tokens:]
        apart = float((found - expected).abs().max() / expected.abs().max())
        bits = self.options.get("quantize")
        padded = bool(self.state.pads.any()) or judge == "oracle"
        close = CLOSE_IN_BITS[bits] if bits is not None and padded else CLOSE
        record(judge.split()[-1], bits if padded else None, apart)
        if not apart <= close:
            raise WrongError(f"{judge}: logits are off by {apart:.2g} of the highest")

    def _compare_kept(self, row: int, alone: CompressedCache) -> None:
        state = self.state
        if self.options.get("quantize") and bool(state.pads.any()) and len(state.done) > 1:
            return  # other neighbours share a scale, so votes differ by rounding
        for layer in alone.compressed_layers:
            found = _sets(state.cache.kept_positions(layer)[row])
            expected = _sets(alone.kept_positions(layer)[0])
            most = max(len(found), len(expected))  # heads are stored per query head, or not yet
            found, expected = (_repeated(heads, most) for heads in (found, expected))
            if state.fewer_votes:
                counts = [sum(map(len, heads)) for heads in (found, expected)]
                alike = self._votes_choose_numbers or counts[0] == counts[1]
            else:
                alike = found == expected
            if not alike:
                told = [
                    f"{len(own)}/{len(other)}" for own, other in zip(found, expected, strict=True)
                ]
                away = [
                    f"-{sorted(other - own)[:6]} +{sorted(own - other)[:6]}"
                    for own, other in zip(found, expected, strict=True)
                ]
                raise WrongError(
                    f"row {row} alone: layer {layer} keeps {' '.join(told)} by head, "
                    f"{'; '.join(away)}"
                )

    def _alone(self, row: int) -> tuple[CompressedCache, Tensor]:
        """The row read alone, and the logits of the last part."""
        state = self.state
        cache, read = state.alone[row] or (self._new_cache(), 0)
        logits = torch.empty(0)
        for number in range(read, len(state.done)):
            part = state.done[number]
            try:
                logits = self._read_alone(cache, part, row, int(state.pads[row]))
            except SnapKVError as error:
                raise WrongError(f"row {row} alone is refused: {_kind(error)}") from error
        state.alone[row] = (cache, len(state.done))
        return cache, logits

    def _read_alone(self, cache: CompressedCache, part: Part, row: int, pads: int) -> Tensor:
        if part.kind == "crop":
            cache.crop(part.stop - part.start)
            return torch.empty(0)
        if part.kind == "turn":
            cache.expect_prompt((part.stop if part.end is None else part.end) - pads)
        logits, start = [], max(part.start, pads)
        for how, stop, *numbers in self._passes_alone(part):
            if stop <= start:
                continue
            piece = part.ids[row : row + 1, start - part.start : stop - part.start]
            cache.expect_tokens(piece)
            with self._reading(how if how == "chunked" else "call", *numbers):
                logits.append(self.model(piece, past_key_values=cache).logits)
            start = stop
        return logits[-1] if len(logits) == 1 else torch.cat(logits, dim=1)

    def _passes_alone(self, part: Part) -> list[tuple[Any, ...]]:
        """At once, but where it matters to what is kept how a turn is read."""
        matters = self.evicts and part.start > 0
        matters |= part.end != part.stop or any(how == "chunked" for how, *_ in part.passes)
        if part.kind == "turn" and matters:
            return part.passes
        return [("call", part.stop)]

    # The oracle.

    def _hidden(
        self, *, in_turn: bool | None = None, after: int | None = None
    ) -> dict[int, Tensor]:
        """Which of the columns seen the next pass will not see, by layer."""
        state = self.state
        seen = state.cache.get_seq_length()
        in_turn = state.turn is not None if in_turn is None else in_turn
        if after is not None:
            in_turn = seen < after
        pages = self.options.get("recall")
        if not seen or state.full is None or (self.recalls and in_turn):
            return {}
        if isinstance(pages, PageRecall) and pages.pages >= 100:
            return {}
        return hidden_columns(state.cache, seen, state.pads)

    def _ask_oracle(
        self, hidden: dict[int, Tensor], start: int, logits: Tensor, *, exact: bool
    ) -> None:
        """Read the same tokens into transformers' own cache."""
        state = self.state
        if not exact or not self._has_oracle():
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
        self._compare("oracle", logits[real], expected[real])

    def _has_oracle(self) -> bool:
        """Whether attention is that of a full cache that hides what is not kept."""
        if self.options.get("quantize") in ("int4", "fp8"):
            return False  # rounding alone moves logits as far as a wrong token would
        recall = self.options.get("recall")
        if isinstance(recall, PageRecall) and recall.pages < 100 and not self._is_whole():
            return False
        return not (isinstance(self.policy, StreamingLLM) and not self._is_whole())

    def _is_whole(self) -> bool:
        """Whether nothing was dropped, in any layer or row."""
        return len(self._whole_layers()) == len(self.state.cache.compressed_layers)

    def _whole_layers(self) -> set[int]:
        cache = self.state.cache
        return {
            layer
            for layer in cache.compressed_layers
            if not cache.get_seq_length()
            or bool(((cache.kept_positions(layer) >= 0).sum(dim=-1) == self._tokens[:, None]).all())
        }

    @property
    def _tokens(self) -> Tensor:
        """(R,) tokens that each row has read; pads count until the first prompt has ended."""
        state = self.state
        in_first = not state.done and (state.turn is not None or state.prompt_end is None)
        return state.cache.get_seq_length() - (0 * state.pads if in_first else state.pads)


class _Watch(StoppingCriteria):
    """Is called by `generate` after every pass, and asks what is hidden from the next one."""

    def __init__(self, ask: Callable[[], dict[int, Tensor]]) -> None:
        self.ask, self.seen = ask, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(self.ask())
        return torch.zeros(len(input_ids), dtype=torch.bool)


apart_by: dict[tuple[str, str | None], float] = {}


def record(judge: str, bits: str | None, apart: float) -> None:
    """Note how far logits were apart at most."""
    key = (judge, bits)
    apart_by[key] = max(apart, apart_by.get(key, 0.0))


def _seen_of(cache: CompressedCache) -> list[tuple[int, Tensor]]:
    """What is seen of a cache from outside: for every layer tokens seen, and positions kept."""
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


def _tokens(seen: list[tuple[int, Tensor]]) -> str:
    return str([(tokens, kept.shape[-1]) for tokens, kept in seen])


def _sets(kept: Tensor) -> list[set[int]]:
    """(H, S) positions as sets, heads that are alike told once."""
    return [{position for position in head if position >= 0} for head in kept.tolist()]


def _repeated(heads: list[set[int]], count: int) -> list[set[int]]:
    return [head for head in heads for _ in range(count // len(heads))]


def _require_positions(kept: Tensor, tokens: Tensor, layer: int) -> None:
    """Ascending, each once, -1 in front, none of a token that was not seen."""
    steps = kept.diff(dim=-1)
    real = kept[..., :-1] >= 0
    wrong = bool(((steps <= 0) & real).any()) or bool((kept >= tokens[:, None, None]).any())
    if kept.shape[-1] and (wrong or bool((kept < -1).any())):
        raise WrongError(f"layer {layer}: expected ascending positions, got {kept.tolist()}")


def _require_bytes(kept: Tensor, layer: Any, row: dict[str, Any], options: dict[str, Any]) -> None:
    """Bytes are those of the tokens that are kept; codes and static buffers are left out."""
    if options.get("quantize") or options.get("storage") == "static":
        return
    keys, values = layer.keys, layer.values
    size = keys.element_size() * (keys.shape[-1] + values.shape[-1])
    slots = kept.numel() if layer.store.kind == "dense" else int((kept >= 0).sum())
    sinks = 0 if layer.notes.sink_keys is None else layer.notes.sink_keys.nbytes
    if row["held_bytes"] != slots * size + sinks:
        raise WrongError(
            f"layer {row['layer']}: expected {slots * size + sinks} bytes of {slots} tokens, "
            f"got {row['held_bytes']}"
        )


def _take_rows(layer: Any, order: Tensor) -> None:
    """The rows of one of transformers' own layers in another order."""
    for name in ("keys", "values", "conv_states", "recurrent_states"):
        held = getattr(layer, name, None)
        if isinstance(held, Tensor) and held.ndim > 1:
            setattr(layer, name, held[order])
        elif isinstance(held, dict):
            setattr(
                layer, name, {key: part[order] for key, part in held.items() if part is not None}
            )
