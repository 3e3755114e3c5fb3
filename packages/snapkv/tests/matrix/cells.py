"""What is tested with every model; each result is right, refused by name, or wrong.

The judge is `tests.oracle`: a full cache of transformers whose attention hides evicted tokens.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from snapkv import AdaKV, CompressedCache, SnapKV, SnapKVError
from snapkv.cache.layer import CompressedLayer
from tests.matrix.shrinking import VOCABULARY, tiny
from tests.oracle import hidden_columns, masked_judge, masked_pass

POLICY = SnapKV(24, window_size=8, kernel_size=5)
PROMPT, NEW = 44, 4
CLOSE = 2e-3
"""How far logits may be apart, as a part of the highest of them; float32 sums make it 1e-4."""
MATTERS = 1e-3
"""How far what is dropped moves them at least, of the same: less, and nothing is judged."""


class WrongError(Exception):
    """An answer is not what it must be."""


class TransformersError(Exception):
    """Nor can transformers' own cache do it."""


@dataclass
class Text:
    """Rows of token ids with pads in front.

    Attributes:
        ids: (B, T) int64.
        mask: (B, T) int64, zero for pads.
    """

    ids: Tensor
    mask: Tensor

    @classmethod
    def drawn(cls, *lengths: int, seed: int = 0) -> "Text":
        """Rows of these lengths, the longest first."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCABULARY - 4, (len(lengths), max(lengths)), generator=generator)
        mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
        return cls(ids * mask, mask.long())

    @property
    def positions(self) -> Tensor:
        return (self.mask.cumsum(-1) - 1).clamp(min=0)

    def row(self, row: int) -> "Text":
        own = self.mask[row].bool()
        return Text(self.ids[row : row + 1, own], self.mask[row : row + 1, own])


@dataclass
class Pair:
    """A compressed cache and the full one of its judge, which read the same text."""

    model: PreTrainedModel
    cache: CompressedCache
    text: Text
    full: DynamicCache = field(init=False)
    seen: int = 0

    def __post_init__(self) -> None:
        self.judge = masked_judge(self.model)
        self.config = self.judge.config.get_text_config(decoder=True)
        self.full = DynamicCache(config=self.config)

    def read(self, stop: int) -> Tensor:
        """(B, N, V): the logits of the next columns up to there, as both caches give them."""
        start, pads = self.seen, (self.text.mask == 0).sum(-1)
        hidden = hidden_columns(self.cache, start, pads) if start else {}
        ids, mask = self.text.ids[:, start:stop], self.text.mask[:, :stop]
        positions = self.text.positions[:, start:stop]
        found = _pass(self.model, self.cache, ids, mask, positions)
        expected = masked_pass(self.judge, self.full, hidden, ids, mask, positions)
        require_close(found[:, -1], expected[:, -1], f"columns {start} to {stop}")
        if not start:
            hold_as_stored(self.cache, self.full)
        self.seen = stop
        return found


def hold_as_stored(cache: CompressedCache, full: DynamicCache) -> None:
    """Give the full cache of one row without pads the numbers that codes stand for.

    Of what it has read by now, where the compressed cache has read more.
    """
    for layer, other in zip(cache.layers, full.layers, strict=True):
        if isinstance(layer, CompressedLayer) and not layer.store.is_exact:
            columns = layer.stored_columns()
            read = int((columns[0, 0] < other.keys.shape[2]).sum())
            for own, its in zip(layer.store.padded(), (other.keys, other.values), strict=True):
                places = columns[:, :, :read, None].expand(-1, -1, -1, own.shape[-1])
                its.scatter_(2, places, own[:, :, :read].to(its.dtype))


def require_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise WrongError where logits are apart, or none."""
    apart = float((found - expected).abs().max() / expected.abs().max())
    if not apart <= CLOSE:
        raise WrongError(f"{what}: logits are off by {apart:.2g} of the highest")


@torch.no_grad()
def _pass(model, cache, ids, mask=None, positions=None) -> Tensor:
    return model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions).logits


def _answered(model: PreTrainedModel, text: Text, cache, *stops: int) -> Tensor:
    """(B, len(stops), V): the logits behind each of these columns."""
    logits, start = [], 0
    for stop in stops:
        ids, positions = text.ids[:, start:stop], text.positions[:, start:stop]
        logits.append(_pass(model, cache, ids, text.mask[:, :stop], positions)[:, -1])
        start = stop
    return torch.stack(logits, dim=1)


_STEPS = (PROMPT, *range(PROMPT + 1, PROMPT + NEW + 1))


def compressed(model: PreTrainedModel, policy=POLICY, **options) -> None:
    """One row, read and gone on from by one token at a time."""
    text = Text.drawn(PROMPT + NEW)
    pair = Pair(model, CompressedCache(model, policy, **options), text)
    found = [pair.read(stop)[:, -1] for stop in _STEPS]
    whole = _answered(pair.judge, text, DynamicCache(config=pair.config), *_STEPS)
    moved = float((torch.stack(found, 1) - whole).abs().max() / whole.abs().max())
    if moved < MATTERS:
        raise WrongError(f"what was dropped moves the logits by {moved:.1g} only")
    if pair.cache.report().kept_tokens > 24 + NEW:
        raise WrongError(f"kept {pair.cache.report().kept_tokens} tokens of a budget of 24")


def padded(model: PreTrainedModel) -> None:
    """Rows with pads in front, then every row alone."""
    text = Text.drawn(PROMPT + NEW, 30 + NEW, 9 + NEW)
    pair = Pair(model, CompressedCache(model, POLICY), text)
    together = torch.stack([pair.read(stop)[:, -1] for stop in _STEPS], dim=1)
    for row, length in enumerate((PROMPT, 30, 9)):
        own, steps = text.row(row), range(length, length + NEW + 1)
        plain = DynamicCache(config=pair.config)
        alone = _answered(pair.judge, own, plain, length)
        padded = _answered(pair.judge, text, DynamicCache(config=pair.config), PROMPT)[row]
        if (alone[0] - padded).abs().max() > CLOSE * alone.abs().max():
            continue  # the model itself answers a padded row in another way
        logits = _answered(model, own, CompressedCache(model, POLICY), *steps)
        require_close(together[row], logits[0], f"row {row} alone")


def turns(model: PreTrainedModel) -> None:
    """A second prompt behind some tokens, stored whole, then one that is compressed."""
    stops = (*_STEPS, PROMPT + NEW + 11, PROMPT + NEW + 12)
    for how in ("append", "compress"):
        pair = Pair(model, CompressedCache(model, POLICY, turns=how), Text.drawn(stops[-1]))
        for stop in stops:
            if stop - pair.seen > 1:
                pair.cache.expect_prompt(stop)
            pair.read(stop)


def in_pieces(model: PreTrainedModel) -> None:
    """The prompt comes in three pieces, the last one shorter than the window."""
    pair = Pair(model, CompressedCache(model, POLICY), Text.drawn(PROMPT + NEW, 30 + NEW))
    pair.cache.expect_prompt(PROMPT)
    for stop in (23, PROMPT - 5, *_STEPS):
        pair.read(stop)


def saved(model: PreTrainedModel) -> None:
    """A cache out of a file goes on as the one that was saved, two rows of it."""
    text = Text.drawn(PROMPT + NEW, 30 + NEW)
    cache = CompressedCache(model, POLICY)
    _answered(model, text, cache, *_STEPS[:2])
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache.safetensors")
        loaded = CompressedCache.load(Path(folder) / "cache.safetensors", model)
    cache, loaded = copy.deepcopy(cache), copy.copy(loaded)
    for each in (cache, loaded):
        each.reorder_cache(torch.tensor([1, 0]))
    text = Text(text.ids.flip(0), text.mask.flip(0))
    for stop in _STEPS[2:]:
        ids, positions = text.ids[:, stop - 1 : stop], text.positions[:, stop - 1 : stop]
        both = [_pass(model, each, ids, text.mask[:, :stop], positions) for each in (cache, loaded)]
        if not torch.equal(*both):
            raise WrongError("a loaded cache gives other logits than the saved one")


def rows(model: PreTrainedModel) -> None:
    """Rows change places and some go, as in beam search; a reset cache reads anew."""
    text = Text.drawn(PROMPT + NEW, 30 + NEW)
    cache = CompressedCache(model, POLICY)
    whole = _answered(model, text, cache, *_STEPS)
    cache.reset()
    _answered(model, text, cache, *_STEPS[:2])
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    turned = Text(text.ids[[1, 1, 0]], text.mask[[1, 1, 0]])
    ids, positions = turned.ids[:, PROMPT + 1 : PROMPT + 2], turned.positions[:, [PROMPT + 1]]
    found = _pass(model, cache, ids, turned.mask[:, : PROMPT + 2], positions)[:, -1]
    require_close(found, whole[[1, 1, 0], 2], "rows in another order")


def coded(model: PreTrainedModel) -> None:
    """Keys and values in eight bits."""
    compressed(model, quantize="int8")


def uneven(model: PreTrainedModel) -> None:
    """Heads of different budgets."""
    compressed(model, AdaKV(POLICY))


def drafted(model: PreTrainedModel) -> None:
    """Prompt lookup gives the tokens of greedy decoding on the same cache."""
    options = {"prompt_lookup_num_tokens": 3}
    plain = _generated(model, CompressedCache(model, POLICY))
    drafts = _generated(model, CompressedCache(model, POLICY), **options)
    if not torch.equal(plain, drafts):
        raise WrongError(f"drafts give {drafts[0, PROMPT:]} for {plain[0, PROMPT:]}")


def _generated(model: PreTrainedModel, cache, **options) -> Tensor:
    """Behind a prompt that repeats itself at its end."""
    ids = Text.drawn(PROMPT).ids
    ids[:, -12:] = ids[:, 12:24]
    options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    return model.generate(ids, past_key_values=cache, **options)


CELLS: dict[str, Callable[[PreTrainedModel], None]] = {
    "compressed": compressed,
    "pads": padded,
    "pieces": in_pieces,
    "turns": turns,
    "files": saved,
    "rows": rows,
    "int8": coded,
    "AdaKV": uneven,
    "drafts": drafted,
}
"""What is tried, by its name in the table."""


def verdict(cell: Callable[[], None]) -> str:
    """ "right", "refused: " and why, or "wrong: " and how."""
    try:
        cell()
    except SnapKVError as error:
        return f"refused: {error}"
    except TransformersError as error:
        return f"refused: transformers: {error}"
    except WrongError as error:
        return f"wrong: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    return "right"


def judged(model_type: str, cell: str) -> str:
    """The verdict of a cell by its name."""
    model = tiny(model_type)

    def tried() -> None:
        try:
            CELLS[cell](model)
        except (SnapKVError, WrongError):
            raise
        except Exception as error:
            if _fails_anyway(model, cell):
                raise TransformersError(f"{type(error).__name__}: {error}") from error
            raise

    return verdict(tried)


def _fails_anyway(model: PreTrainedModel, cell: str) -> bool:
    """Whether transformers' own cache cannot do it either."""
    text, cache = Text.drawn(PROMPT, 30), DynamicCache(config=model.config)
    try:
        if cell == "drafts":
            _generated(model, cache, prompt_lookup_num_tokens=3)
        else:
            _answered(model, text, cache, PROMPT - 1, PROMPT)
    except Exception:
        return True
    return False
