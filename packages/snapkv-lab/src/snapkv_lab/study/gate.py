"""A gate for `KVzap`, which predicts from a token's own key and value how a second reading scores
it.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv.validation import require_at_least, require_each_at_least
from snapkv_lab.drawing import Panel, draw_curves
from snapkv_lab.evaluate.haystack import (
    draw_distinct,
    draw_number,
    draw_word_key,
    load_python_sources,
    load_python_topics,
    load_readmes,
    token_ids,
)
from snapkv_lab.evaluate.store import Progress, Store
from snapkv_lab.report.tables import Table
from snapkv_lab.rows import Row
from snapkv_lab.study.base import Findings, Study, group_by_label, mean_rows
from snapkv_lab.study.material import LEAST_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from snapkv.policies import PromptLayer
    from snapkv.policies.gate import Gate
    from snapkv_app.models import LoadedModel

FILE = "gate.safetensors"
SINKS, LAST = 4, 16
"""The first and last tokens of a text that are not used, because methods keep them in any case."""

RIDGE = 1e-3
"""The share of each feature's variance that is added to it."""

_LEAST_SCORE = 1e-12


@dataclass(frozen=True, kw_only=True)
class FitGate(Study):
    """Fit the gate of `kvzap` to a model: what KVzip+ would keep, from keys and values.

    The model reads texts of six kinds twice: source code, a language reference, readmes, records,
    logs and made up sentences. For every KV head, ridge regression fits the logarithm of the score
    of KVzip+ (KVzap, arXiv 2601.07891) to the token's key and value. The last text of each kind is
    held out to measure how well the ranks agree. The gate is stored for this model and used by
    `kvzap` from then on. The folder also holds it as `gate.safetensors`.

    Args:
        texts: number of texts.
        lengths: tokens of the texts, in turn; a gate is best at lengths like these.
        seed: random seed of the texts.
        remember: store the gate for later runs.
    """

    name: ClassVar[str] = "fit-gate"

    texts: int = 36
    lengths: tuple[int, ...] = (300, 700, 1200, 2000)
    seed: int = 0
    remember: bool = True

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: there are fewer than two texts of each kind, there is no length,
                or a number is out of range.
            InvalidTypeError: a number is not an integer.
        """
        require_at_least("texts", self.texts, 2 * len(KINDS))
        require_each_at_least("lengths", self.lengths, LEAST_TOKENS)

    def measure(
        self, loaded: "LoadedModel", folder: Path, on_progress: Progress | None = None
    ) -> Findings:
        """Read the texts, fit the gate, and save it to a file.

        If `remember` is set, the gate is also stored for this model on this machine. A stopped run
        starts again from its beginning.

        Returns:
            The agreement on the texts that were held out, one row per text and layer.

        Raises:
            InvalidArgumentError: the folder holds another run.
            MissingDependencyError: wonderwords is not installed.
            OutputError: the gate cannot be written.
            PromptTooLongError: the model has too few positions.
        """
        from snapkv.cache.saving.writing import replace_file
        from snapkv.hf.known_gates import remember_gate

        report = on_progress or (lambda *_: None)
        fitted, left_out = Regression(), []
        for place, (kind, ids) in enumerate(self._read(loaded)):
            report(kind, place, self.texts)
            layers = read_layers_twice(loaded, ids)
            if place < self.texts - len(KINDS):
                fitted.add(layers)
            else:
                left_out.append((kind, layers))
        gate = fitted.gate(loaded)
        rows = [row for kind, layers in left_out for row in _agreement(gate, kind, layers)]
        report("done", self.texts, self.texts)
        with Store(folder, block := self.settings(loaded)) as store:
            unwritten = store.summarise(rows)
        replace_file(folder / FILE, gate.as_file())
        closing = f"--policy kvzap --set gate={folder / FILE} uses it"
        if self.remember:
            closing = f"--policy kvzap uses it from now on: stored in {remember_gate(gate)}"
        return Findings(folder=folder, run=block, rows=rows, closing=closing, unwritten=unwritten)

    def _read(self, loaded: "LoadedModel") -> Iterator[tuple[str, list[int]]]:
        """Yield the kind and the token ids of each text, in a fixed order.

        The kinds take turns, and each kind has texts of all lengths. A text that the model could
        not read twice is cut.
        """
        kinds, most = list(KINDS.items()), (loaded.max_tokens or 10**9) // 2 - 64
        for place in range(self.texts):
            kind, make = kinds[place % len(kinds)]
            draw = random.Random(f"{self.seed}/{kind}/{place}")
            tokens = min(most, self.lengths[(place + place // len(kinds)) % len(self.lengths)])
            ids: list[int] = []
            while len(ids) < tokens:
                ids += token_ids(loaded.tokenizer, make(draw) + "\n\n")
            yield kind, ids[:tokens]

    def table(self, rows: Sequence[Row]) -> Table:
        """Return a table of the mean agreement over layers and texts for each kind of text."""
        numbers = ("correlation", "best_quarter")
        return Table(
            title="agreement with KVzip+ on texts that were left out, mean over layers and heads",
            headings=("kind", "rank correlation", "of its best quarter"),
            rows=[
                (row["kind"], f"{row['correlation']:.2f}", f"{row['best_quarter']:.0%}")
                for row in mean_rows(rows, ("kind",), numbers)
            ],
        )

    def figure(self, rows: Sequence[Row]) -> Any:
        kinds = group_by_label(rows, "kind")
        return draw_curves(
            Panel("Rank correlation with KVzip+", "layer", "correlation", kinds),
            Panel("Of KVzip+'s best quarter", "layer", "best_quarter", kinds),
        )


class Regression:
    """A ridge regression for each head of each layer, which stores only sums over all tokens."""

    def __init__(self) -> None:
        self._products: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, layers: "Sequence[PromptLayer]") -> None:
        """Add the tokens of a text to the regression.

        Args:
            layers: all layers of the model in order, as `read_layers_twice` returns them. All texts
                must have been read by the same model.
        """
        for depth, layer in enumerate(layers):
            looked_at, scores = _examples(layer)
            products, targets = looked_at.mT @ looked_at, looked_at.mT @ scores[..., None]
            if depth == len(self._products):
                self._products.append(products)
                self._targets.append(targets)
            else:
                self._products[depth] += products
                self._targets[depth] += targets
            self._sizes = layer.keys.shape[-1], layer.values.shape[-1]

    def weights(self) -> "Tensor":
        """Compute the weights of the regression. At least one text must have been added.

        Returns:
            (layers, heads, features) float64. The last feature is the constant, whose weight is not
            shrunk.
        """
        import torch

        products, targets = torch.stack(self._products), torch.stack(self._targets)
        tokens = products[..., -1:, -1:]
        means = products[..., -1, :] / tokens[..., 0]
        variances = products.diagonal(dim1=-2, dim2=-1) / tokens[..., 0] - means.square()
        added = RIDGE * tokens[..., 0] * variances.clamp(min=1e-9)
        added[..., -1] = 0.0
        solution: Tensor = torch.linalg.solve(products + torch.diag_embed(added), targets)[..., 0]
        return solution

    def gate(self, loaded: "LoadedModel") -> "Gate":
        """Return the fitted gate, which works with this model only."""
        from snapkv.hf.identity import digest_of
        from snapkv.policies.gate import Gate

        return Gate.of(self.weights(), *self._sizes, model=digest_of(loaded.model))


def read_layers_twice(loaded: "LoadedModel", ids: Sequence[int]) -> "list[PromptLayer]":
    """Let the model read a text twice, and return the states of all layers with the scores of
    KVzip+, which are the field `received` of each layer.

    Args:
        loaded: the model and its tokenizer.
        ids: the token ids of the text, more than `SINKS` and `LAST` together.
    """
    import torch

    from snapkv import CompressedCache, KVzip
    from snapkv.kvzip import instruction_of, read_layers

    class Teacher(KVzip):
        """The policy KVzip+, which also receives the rotation of the keys."""

        needs = KVzip(plus=True).needs | {"rotation"}

    cache = CompressedCache(loaded.model, Teacher(SINKS + LAST + 1, window_size=LAST, plus=True))
    tokens = torch.tensor([list(ids)], device=loaded.model.device)
    instruction = instruction_of(loaded.tokenizer)
    return read_layers(loaded.model, tokens, cache, instruction_ids=instruction)


def _examples(layer: "PromptLayer") -> tuple["Tensor", "Tensor"]:
    """Return the features and the logarithms of the scores of the tokens in a layer, from which the
    regression learns. The first `SINKS` and the last `LAST` tokens are left out.

    Args:
        layer: a layer that `read_layers_twice` has returned, which has scores.

    Returns:
        (H, N, features) and (H, N), both float64, for the H KV heads and the N remaining tokens.
    """
    from snapkv.policies.gate import features

    assert layer.received is not None
    own = slice(SINKS, layer.keys.shape[2] - LAST)
    scores = layer.received[0, :, own].double().clamp(min=_LEAST_SCORE).log()
    return features(layer, own)[0].double(), scores


def _agreement(gate: "Gate", kind: str, layers: "Sequence[PromptLayer]") -> list[Row]:
    """Measure how well a gate agrees with the scores of KVzip+ on one text.

    Args:
        gate: the gate.
        kind: the kind of the text.
        layers: all layers, as `read_layers_twice` returns them.

    Returns:
        A row for each layer with "layer", "kind", "tokens", "correlation" and "best_quarter". Both
        are means over the heads: the correlation of the ranks, from -1 to 1, and the share of the
        best quarter of the tokens by KVzip+ that is also in the best quarter by the gate.
    """
    import torch

    rows = []
    for depth, layer in enumerate(layers):
        _, scores = _examples(layer)
        predicted = gate.log_scores(layer)[0, :, SINKS : layer.keys.shape[2] - LAST].double()
        best = max(1, scores.shape[1] // 4)
        ranks = [each.argsort(dim=-1).argsort(dim=-1).double() for each in (predicted, scores)]
        pairs = [torch.stack(pair) for pair in zip(*ranks, strict=True)]
        both = [int((pair >= scores.shape[1] - best).all(dim=0).sum()) for pair in pairs]
        rows.append(
            {
                "layer": depth,
                "kind": kind,
                "tokens": layer.keys.shape[2],
                "correlation": fmean(float(torch.corrcoef(pair)[0, 1]) for pair in pairs),
                "best_quarter": fmean(both) / best,
            }
        )
    return rows


# The texts that are read.


def _part(text: str, draw: random.Random, characters: int = 6000) -> str:
    """Return a random part of a text with `characters` characters, or a shorter text whole."""
    start = draw.randrange(max(1, len(text) - characters))
    return text[start : start + characters]


def _records(draw: random.Random) -> str:
    """Return 40 random records as a JSON list, on one line or indented."""
    rows = [
        {
            "id": draw_number(draw, 6),
            "name": draw_word_key(draw),
            "price": draw.randrange(10**5) / 100,
        }
        for _ in range(40)
    ]
    return json.dumps(rows, indent=draw.choice([None, 1]))


def _logs(draw: random.Random) -> str:
    """Return 60 lines of an invented log."""
    parts = draw_distinct(lambda: draw_word_key(draw), 6)
    return "\n".join(
        f"2024-0{draw.randrange(1, 9)}-{draw_number(draw, 2)} "
        f"{draw.choice(('INFO', 'WARN', 'ERROR'))} {draw.choice(parts)}: "
        f"{draw.choice(('started', 'closed', 'waited', 'failed'))} after "
        f"{draw_number(draw, draw.randrange(1, 5))} ms"
        for _ in range(60)
    )


def _sentences(draw: random.Random) -> str:
    """Return 60 made up sentences on one line."""
    return " ".join(
        f"{draw.choice(_PEOPLE)} {draw.choice(_DID)} the {draw_word_key(draw).replace('-', ' ')} "
        f"{draw.choice(('on Monday', 'last May', 'with care'))} in {draw.randrange(1950, 2030)}."
        for _ in range(60)
    )


_PEOPLE = ("Anna", "Bjorn", "Carla", "Dmitri", "Elena", "Farid", "Grete", "Hugo", "Ines", "Jonas")
_DID = ("bought", "sold", "found", "lost", "repaired", "painted", "praised", "moved", "described")

KINDS: dict[str, Callable[[random.Random], str]] = {
    "code": lambda draw: _part(draw.choice(load_python_sources(20_000)), draw),
    "reference": lambda draw: "\n\n".join(draw.sample(load_python_topics().pieces, 2)),
    "readmes": lambda draw: _part(draw.choice(load_readmes()), draw),
    "records": _records,
    "logs": _logs,
    "sentences": _sentences,
}
"""The kinds of texts. Experiments measure gates on other kinds: essays and paragraphs of
Wikipedia.
"""
