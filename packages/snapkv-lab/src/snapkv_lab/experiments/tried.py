"""What was tried to get more right answers from the same bytes, and is no part of the product.

Plain sketches: what a layer keeps is rounded as codes of so many bits would, and held decoded. The
bytes are counted as codes would take them: a scale and a least number of 16 bits a group. The texts
are those of `per_byte`, the ranking is the default's, window and sinks stay as they came.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from snapkv import AdaKV, CriticalKV, default_policy
from snapkv.app.observing import RecordedPrompt
from snapkv.policies import Policy, PromptLayer, Selection
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import Pivot, Table
from snapkv_lab.experiments.per_byte import SHARES
from snapkv_lab.experiments.records import Row, grouped, last_run
from snapkv_lab.experiments.texts import (
    Case,
    ReadText,
    Text,
    answers_of,
    loss_above,
    questions,
    right_and_loss,
    scored,
    texts_from,
)

GROUP = 32
WINDOW, SINKS = 16, 4
PARAMETER_BYTES = 4
"""A scale and a least number of 16 bits."""


def in_groups(states: Tensor, bits: int, axis: int) -> Tensor:
    """Asymmetric integers, in groups of 32 along an axis; the last group may be smaller."""
    parts = []
    for part in torch.split(states, GROUP, dim=axis):
        least = part.amin(axis, keepdim=True).half().float()
        step = (part.amax(axis, keepdim=True) - least).clamp(min=1e-6) / (2**bits - 1)
        step = step.half().float().clamp(min=2.0**-24)
        parts.append(((part - least) / step).round().clamp(0, 2**bits - 1) * step + least)
    return torch.cat(parts, dim=axis)


@functools.cache
def hadamard(size: int) -> Tensor:
    """An orthogonal matrix of equal entries up to their signs; the size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


NORMAL_LEVELS = {2: (0.4528, 1.510), 3: (0.2451, 0.7560, 1.344, 2.152)}
"""Of so many bits those that lose least of a normal distribution, upwards of 0 (Max, 1960)."""


def rotated(states: Tensor, bits: int) -> Tensor:
    """Turned by a Hadamard matrix, then the nearest level of a normal; a scale for each token."""
    turn = hadamard(states.shape[1])
    turned = states @ turn
    scale = turned.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6).half().float()
    upper = torch.tensor(NORMAL_LEVELS[bits])
    levels = torch.cat([-upper, upper])
    nearest = (turned / scale)[..., None].sub(levels).abs().argmin(-1)
    return (levels[nearest] * scale) @ turn.T


@dataclass(frozen=True)
class Tier:
    """How some of the coded tokens are held: bits of keys and values, and which part of the bytes.

    A tier takes the best-ranked tokens that those before it have left.
    """

    keys: int
    values: int
    of_bytes: float = 1.0
    turns: bool = False

    def token_bytes(self, size: int) -> float:
        """Of one head's token: codes, and its part of the groups' scales."""
        scales = 2 if self.turns else size * PARAMETER_BYTES / GROUP
        values = size / GROUP * PARAMETER_BYTES
        return (self.keys + self.values) * size / 8 + scales + values

    def rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        turned = rotated(keys, self.keys) if self.turns else in_groups(keys, self.keys, 0)
        return turned, in_groups(values, self.values, 1)


def ridge(layer: PromptLayer, head: int, kept: Tensor, values: Tensor, weight: float) -> Tensor:
    """(N, D) values that bring the last queries' outputs near those of the whole prompt, as GRKV.

    The least change of the kept values, by a ridge regression whose penalty is `weight` times the
    mean square of the attention that is kept.
    """
    group = layer.queries.shape[1] // layer.keys.shape[1]
    queries = layer.queries[0, head * group : (head + 1) * group].float()  # (G, N, D)
    N, T = queries.shape[1], layer.keys.shape[2]
    scores = queries @ layer.keys[0, head].float().T * layer.score_options.scaling
    later = torch.arange(T) > torch.arange(T - N, T)[:, None]
    scores = scores.masked_fill(later, -math.inf)
    whole = scores.softmax(-1) @ layer.values[0, head].float()
    weights = scores[..., kept].softmax(-1).flatten(0, 1)
    missing = whole.flatten(0, 1) - weights @ values
    square = weights @ weights.T
    penalty = weight * square.diagonal().mean()
    change = torch.linalg.solve(square + penalty * torch.eye(len(square)), missing)
    return values + weights.T @ change


@dataclass(frozen=True, kw_only=True)
class Way:
    """One thing that was tried: what ranks, in how many bits, and what is done to the values."""

    tiers: Sequence[Tier] = (Tier(4, 4),)
    around: Callable[[Any], Policy] | None = None
    by_layer: bool = False
    ridge: float = 0.0

    def counts(self, size: int, prompt_tokens: int, share: float) -> list[int]:
        """Tokens of each tier that so large a share of a head's 16-bit bytes has room for."""
        exact = WINDOW + SINKS
        room = (share * prompt_tokens - exact) * size * 4
        counts = [int(max(0.0, room) * t.of_bytes / t.token_bytes(size)) for t in self.tiers]
        left = prompt_tokens - exact
        for place, count in enumerate(counts):
            counts[place] = min(count, left)
            left -= counts[place]
        return counts

    def bytes(self, size: int, counts: Sequence[int], prompt_tokens: int) -> float:
        """The share of a head's 16-bit bytes that such counts take."""
        tiers = sum(c * t.token_bytes(size) for c, t in zip(counts, self.tiers, strict=True))
        return (tiers / (4 * size) + WINDOW + SINKS) / prompt_tokens


WAYS: dict[str, Way] = {
    "int4, as shipped": Way(),
    "keys 3, values 4": Way(tiers=(Tier(3, 4),)),
    "keys 3 rotated, values 4": Way(tiers=(Tier(3, 4, turns=True),)),
    "keys 2, values 4": Way(tiers=(Tier(2, 4),)),
    "keys 2 rotated, values 4": Way(tiers=(Tier(2, 4, turns=True),)),
    "tiers 8, 4, 2": Way(tiers=(Tier(8, 8, 0.25), Tier(4, 4, 0.5), Tier(2, 2, 0.25))),
    "tiers 8, 4": Way(tiers=(Tier(8, 8, 0.25), Tier(4, 4, 0.75))),
    "int4, ridge 0.1": Way(ridge=0.1),
    "int4, ridge 1": Way(ridge=1.0),
    "int4, CriticalKV": Way(around=CriticalKV),
    "int4, AdaKV": Way(around=AdaKV),
    "int4, shares by layer": Way(by_layer=True),
}


@dataclass(frozen=True, kw_only=True)
class _Chosen(Policy):
    """Keeps what was chosen before."""

    name: ClassVar[str] = "chosen"

    selections: dict[int, Selection | None] = field(default_factory=dict)

    @property
    def query_tokens(self) -> int:
        return 1

    def select(self, layer: PromptLayer) -> Selection | None:
        return self.selections[layer.depth]


def kept_in(
    way: Way, layer: PromptLayer, scores: Callable[[Policy], Any], counts: Sequence[int]
) -> tuple[Selection | None, PromptLayer]:
    """What a layer keeps, and the layer with what the codes of its keys and values stand for."""
    total = sum(counts) + WINDOW + SINKS
    T = layer.keys.shape[2]
    if total >= T:
        selection, slots = None, torch.arange(T).expand(layer.keys.shape[1], T)
    else:
        policy = default_policy(total)
        selection = scores(policy if way.around is None else way.around(policy))
        assert selection is not None
        slots = selection.keep_indices[0].expand(layer.keys.shape[1], -1)
    keys, values = layer.keys.clone(), layer.values.clone()
    rated = _rated(layer)[0] if len(way.tiers) > 1 else None
    for head, own in enumerate(slots):
        kept = own[own >= 0]
        coded = kept[(kept >= SINKS) & (kept < T - WINDOW)]
        held = layer.values[0, head].float()
        if way.ridge and selection is not None:
            corrected = ridge(layer, head, kept, held[kept], way.ridge)
            held = held.index_copy(0, kept, corrected)
        for tier, places in _tiers(way, coded, counts, None if rated is None else rated[head]):
            states = layer.keys[0, head, places].float(), held[places]
            some = tier.rounded(*states)
            keys[0, head, places], values[0, head, places] = (each.to(keys.dtype) for each in some)
    return selection, replace(layer, keys=keys, values=values)


def _tiers(
    way: Way, coded: Tensor, counts: Sequence[int], rated: Tensor | None
) -> Iterator[tuple[Tier, Tensor]]:
    """The tokens of each tier, ascending; those that are more or fewer are the last tier's."""
    if rated is None:
        yield way.tiers[0], coded
        return
    best = coded[rated[coded].argsort(descending=True, stable=True)]
    parts = torch.tensor(counts[:-1]).cumsum(0)
    for tier, part in zip(way.tiers, torch.tensor_split(best, parts), strict=True):
        if len(part):
            yield tier, part.sort().values


def compressed(
    way: Way, prompt: RecordedPrompt, share: float, shares: Sequence[float]
) -> tuple[Any, float, float]:
    """A cache that keeps so large a share of the bytes; tokens and bytes of it, means over layers.

    `shares` are those of the layers, 1 on average, for ways that go by them.
    """
    size, T = prompt.layers[0].keys.shape[-1], prompt.prompt_tokens
    selections, layers, held, tokens = {}, [], [], []
    for layer in prompt.layers:
        own = share * (shares[layer.depth] if way.by_layer else 1.0)
        counts = way.counts(size, T, own)
        policy_of = functools.partial(_select, layer)
        selections[layer.depth], new = kept_in(way, layer, policy_of, counts)
        layers.append(new)
        held.append(way.bytes(size, counts, T))
        tokens.append(sum(counts) + WINDOW + SINKS)
    cache = replace(prompt, layers=layers).compressed(_Chosen(selections=selections))
    return cache, fmean(tokens), fmean(held)


def _select(layer: PromptLayer, policy: Policy) -> Selection | None:
    wanted = min(policy.query_tokens, layer.queries.shape[2])
    return policy.select(replace(layer, queries=layer.queries[:, :, -wanted:]))


def _rated(layer: PromptLayer) -> Tensor:
    """(1, H, P) float32: the default's ranking, as shares of the window's attention."""
    window = replace(layer, queries=layer.queries[:, :, -WINDOW:])
    return default_policy(WINDOW + SINKS + 1).rated(window)


def layer_shares(given: Given) -> list[float]:
    """How many positions each layer's votes ask for, on other texts; 1 on average, 0.5 to 2."""
    asked: list[Tensor] = []
    for text, _ in zip(texts_from(given, 300), range(given.calibrated), strict=False):
        read = ReadText(given.loaded.model, text.ids)
        prompt = read.asked(text.cases[0].question_ids)
        by_layer = []
        for layer in prompt.layers:
            by_layer.append(float((_rated(layer) > 0.0015).sum(-1).float().mean()))
        asked.append(torch.tensor(by_layer) / fmean(by_layer))
    shares = torch.stack(asked).mean(0).clamp(0.5, 2.0)
    found: list[float] = (shares / shares.mean()).tolist()
    return found


def _measure(given: Given, text: Text) -> Iterator[Row]:
    if not hasattr(given, "shares"):
        given.shares = layer_shares(given)

    def answers(prompt: RecordedPrompt, case: Case) -> Iterator[Row]:
        for share, (name, way) in itertools.product(SHARES, WAYS.items()):
            cache, tokens, held = compressed(way, prompt, SHARES[share], given.shares)
            found = {"share": share, "way": name, "kept": tokens, "bytes": round(held, 5)}
            yield found | scored(prompt, cache, case)

    return questions(given.loaded.model, text, answers)


def _cells(rows: list[Row]) -> Iterator[Row]:
    cells = grouped(answers_of(rows), lambda row: (row["way"], row["share"]))
    for (way, share), own in cells.items():
        needles = [row for row in own if row["of"]["text"].startswith("needles")]
        yield {
            "way": way,
            "share": share,
            "right": right_and_loss(own),
            "needles": f"{loss_above(needles):+.3f}" if needles else "",
            "kept": f"{fmean(row['kept'] for row in own):.0f}",
        }


TRIED = Experiment(
    name="tried",
    title="Tried, and no part of the product",
    takes="an hour",
    measure=_measure,
    cases=lambda given, part: texts_from(given, 200),
    options={
        "tokens": Sized(1024, 512),
        "rounds": Sized(6, 1),
        "calibrated": Sized(4, 1),
        "dtype": "bfloat16",
    },
    measured=last_run,
    tables=[
        Table(
            Pivot("way", "{way}", "{share}", "{right}"),
            "Right answers, and the loss per token above the full cache's",
            made=_cells,
        ),
        Table(
            Pivot("way", "{way}", "{share}", "{needles}"),
            "Loss of needles above the full cache's",
            made=_cells,
        ),
        Table(Pivot("way", "{way}", "{share}", "{kept}"), "Tokens kept", made=_cells),
    ],
)
