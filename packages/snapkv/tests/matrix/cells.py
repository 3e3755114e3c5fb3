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
from snapkv.hf.cache_argument import passed
from tests.matrix.shrinking import VOCABULARY, tiny
from tests.oracle import hidden_columns, masked_judge, masked_pass

POLICY = SnapKV(24, window_size=8, kernel_size=5)
PROMPT, NEW = 44, 4
CLOSE = 2e-3
"""Allowed difference of logits relative to the largest; float32 sums cause about 1e-4."""
MATTERS = 1e-3
"""Least relative change of the logits by evicted tokens; with less, a test shows nothing."""


class WrongError(Exception):
    """Raised if a result differs from the expected one."""


class TransformersError(Exception):
    """Raised if the cache of transformers fails in the same test."""


@dataclass
class Text:
    """Left-padded rows of token ids.

    Attributes:
        ids: (B, T) int64.
        mask: (B, T) int64, zero for padding.
    """

    ids: Tensor
    mask: Tensor

    @classmethod
    def drawn(cls, *lengths: int, seed: int = 0) -> "Text":
        """Return random rows of these lengths, the longest first."""
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
    """A compressed cache and the full cache of its judge, which read the same text."""

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
        """Read up to column `stop` with both caches, compare, and return the logits, (B, N, V)."""
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
    """Copy dequantized values into the full cache of one row without padding.

    Only the columns that the full cache has read are copied.
    """
    for layer, other in zip(cache.layers, full.layers, strict=True):
        if isinstance(layer, CompressedLayer) and not layer.store.is_exact:
            columns = layer.stored_columns()
            read = int((columns[0, 0] < other.keys.shape[2]).sum())
            for own, its in zip(layer.store.padded(), (other.keys, other.values), strict=True):
                places = columns[:, :, :read, None].expand(-1, -1, -1, own.shape[-1])
                its.scatter_(2, places, own[:, :, :read].to(its.dtype))


def require_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise WrongError if logits differ too much or are NaN."""
    apart = float((found - expected).abs().max() / expected.abs().max())
    if not apart <= CLOSE:
        raise WrongError(f"{what}: logits are off by {apart:.2g} of the highest")


@torch.no_grad()
def _pass(model, cache, ids, mask=None, positions=None) -> Tensor:
    return model(ids, **passed(cache), attention_mask=mask, position_ids=positions).logits


def _answered(model: PreTrainedModel, text: Text, cache, *stops: int) -> Tensor:
    """Read the text; return the last logits of each pass up to a stop, (B, len(stops), V)."""
    logits, start = [], 0
    for stop in stops:
        ids, positions = text.ids[:, start:stop], text.positions[:, start:stop]
        logits.append(_pass(model, cache, ids, text.mask[:, :stop], positions)[:, -1])
        start = stop
    return torch.stack(logits, dim=1)


_STEPS = (PROMPT, *range(PROMPT + 1, PROMPT + NEW + 1))


def compressed(model: PreTrainedModel, policy=POLICY, **options) -> None:
    """Test one row that is read and continued token by token."""
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
    """Test that left-padded rows equal each row alone."""
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
    """Test a second prompt after decoding, both with append and with compress."""
    stops = (*_STEPS, PROMPT + NEW + 11, PROMPT + NEW + 12)
    for how in ("append", "compress"):
        pair = Pair(model, CompressedCache(model, POLICY, turns=how), Text.drawn(stops[-1]))
        for stop in stops:
            if stop - pair.seen > 1:
                pair.cache.expect_prompt(stop)
            pair.read(stop)


def in_pieces(model: PreTrainedModel) -> None:
    """Test a prompt in three pieces, the last one shorter than the window."""
    pair = Pair(model, CompressedCache(model, POLICY), Text.drawn(PROMPT + NEW, 30 + NEW))
    pair.cache.expect_prompt(PROMPT)
    for stop in (23, PROMPT - 5, *_STEPS):
        pair.read(stop)


def saved(model: PreTrainedModel) -> None:
    """Test that a loaded cache of two rows continues like the saved one."""
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
    """Test reordered and removed rows, as in beam search, and a reset cache."""
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
    """Test keys and values that are quantized to eight bits."""
    compressed(model, quantize="int8")


def uneven(model: PreTrainedModel) -> None:
    """Test heads with different budgets."""
    compressed(model, AdaKV(POLICY))


def drafted(model: PreTrainedModel) -> None:
    """Test that prompt lookup gives the tokens of greedy decoding."""
    options = {"prompt_lookup_num_tokens": 3}
    plain = _generated(model, CompressedCache(model, POLICY))
    drafts = _generated(model, CompressedCache(model, POLICY), **options)
    if not torch.equal(plain, drafts):
        raise WrongError(f"drafts give {drafts[0, PROMPT:]} for {plain[0, PROMPT:]}")


def _generated(model: PreTrainedModel, cache, **options) -> Tensor:
    """Return greedy tokens after a prompt whose end repeats earlier text."""
    ids = Text.drawn(PROMPT).ids
    ids[:, -12:] = ids[:, 12:24]
    options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    return model.generate(ids, **passed(cache), **options)


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
"""The tests, by their names in the table."""


def verdict(cell: Callable[[], None]) -> str:
    """Run a test; return "right", "refused: " and the reason, or "wrong: " and the difference."""
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
    """Return the verdict of a cell by its name."""
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
    """Return whether the cache of transformers fails in this test, too."""
    text, cache = Text.drawn(PROMPT, 30), DynamicCache(config=model.config)
    try:
        if cell == "drafts":
            _generated(model, cache, prompt_lookup_num_tokens=3)
        else:
            _answered(model, text, cache, PROMPT - 1, PROMPT)
    except Exception:
        return True
    return False
