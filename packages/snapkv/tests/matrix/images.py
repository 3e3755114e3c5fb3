"""What is tried with an image in the prompt: through `generate`, which knows every model's ways.

The judge is that of text. An image has what shape the model takes, of those that there are, and
stands for as many tokens as it takes at most.
"""

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from snapkv import AdaKV, CompressedCache, SnapKVError
from snapkv.hf.cache_argument import passed
from tests.matrix.cells import (
    CLOSE,
    MATTERS,
    NEW,
    POLICY,
    PROMPT,
    Text,
    TransformersError,
    compressed,
    hold_as_stored,
    require_close,
    verdict,
)
from tests.matrix.shrinking import IMAGE_ID, IMAGE_SIZE, seeing
from tests.oracle import hidden_columns, hiding_by_step, masked_judge

_BEFORE = 4
"""Number of tokens in front of an image."""
_MOST_TOKENS = 37


class NoImageError(Exception):
    """Raised if the model accepts none of the images that these tests can make."""


@dataclass(frozen=True)
class Image:
    """An image in the form that a model accepts.

    Attributes:
        inputs: arguments of the model.
        tokens: number of tokens that it takes in the text.
        kinds: name of the argument that marks image tokens; "" if there is none.
    """

    inputs: dict[str, Any]
    tokens: int
    kinds: str
    begin: int | None = None  # the id of the token before it, where there is one

    def placed(self, ids: Tensor, start: int) -> Tensor:
        """Return the ids with the tokens of the image placed in each row."""
        ids = ids.clone()
        ids[:, start : start + self.tokens] = IMAGE_ID
        if self.begin is not None:
            ids[:, start - 1] = self.begin
        return ids

    def arguments(self, ids: Tensor) -> dict[str, Any]:
        """Return the arguments of the model for rows of ids with one image each."""
        rows = {}
        for name, each in self.inputs.items():
            is_packed = name == "pixel_values" and "target_sizes" in self.inputs
            rows[name] = torch.cat([each] * len(ids), dim=-1 if is_packed else 0)
        return rows | self.types(ids)

    def types(self, ids: Tensor) -> dict[str, Tensor]:
        if (tiles := self.inputs.get("aspect_ratio_mask")) is not None:  # by cross attention
            return {"cross_attention_mask": tiles[:, None].expand(*ids.shape, *tiles.shape[1:])}
        return {self.kinds: (ids == IMAGE_ID).int()} if self.kinds else {}


def _shapes(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield a random image in every shape that a model may accept."""
    vision = getattr(model.config, "vision_config", None)
    taken = inspect.signature(model.forward).parameters
    sizes = (getattr(part, "image_size", None) for part in (vision, model.config))
    size = next((each for each in sizes if isinstance(each, int)), IMAGE_SIZE)
    patch = next((each for each in (getattr(vision, "patch_size", 8),) if isinstance(each, int)), 8)
    depth = _first(vision, "temporal_patch_size", "patch_temporal") or 1
    channels = _first(vision, "in_channels", "in_chans") or 3
    side = 2 * (_first(vision, "spatial_merge_size") or 2)
    drawn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    pixels, patches = drawn(1, 3, size, size), drawn(side * side, channels * depth * patch**2)
    pooled = patch * (_first(vision, "pooling_kernel_size") or 1)
    tiles = _first(vision, "max_num_tiles") or 1
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    extras = {
        "image_sizes": torch.tensor([[size, size]]),
        "image_position_ids": places[None].flip(-1),
        "image_grid_thw": torch.tensor([[1, side, side]]),
        "image_grid_hw": torch.tensor([[side, side]]),
        "image_merge_sizes": torch.tensor([2]),
        "spatial_shapes": torch.tensor([[side, side]]),
        "target_sizes": torch.tensor([[side, side]]),
        "high_res_pixel_values": pixels,
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
    }
    extras = {name: each for name, each in extras.items() if name in taken}
    shapes = [pixels, pixels[None], torch.stack([pixels] * 2, dim=1), patches[None]]
    shapes += [drawn(1, side * side, channels * pooled**2)]
    shapes += [pixels.expand(1, 1, tiles, 3, size, size)]
    if "image_grid_thw" in taken or "image_grid_hw" in taken:
        shapes = [patches, patches.view(side * side, channels * depth, patch, patch)]
    for each in shapes:
        given = {"pixel_values": each} | extras
        if each.ndim == 3 and "pixel_attention_mask" in taken:
            given["pixel_attention_mask"] = torch.ones(1, side * side, dtype=torch.long)
        yield given
        if "image_sizes" in extras:  # which other encoders of the same model do not take
            yield {"pixel_values": each}


def _first(config: Any, *names: str) -> Any:
    return next((each for name in names if (each := getattr(config, name, None))), None)


@functools.cache
def image_of(model_type: str) -> Image:
    """Return an image that the model accepts.

    Raises:
        NoImageError: the model accepts none of the known shapes.
    """
    model = seeing(model_type)
    config = model.config
    if IMAGE_ID not in (getattr(config, f"image_token_{end}", None) for end in ("id", "index")):
        raise NoImageError("no id of an image's tokens")
    taken = inspect.signature(model.forward).parameters
    kinds = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in taken), "")
    begin = getattr(config, "vision_start_token_id", None)
    for inputs in _shapes(model):
        said: list[str] = []
        for tokens in (_MOST_TOKENS, *range(1, _MOST_TOKENS)):
            image = Image(inputs, tokens, kinds, begin)
            try:
                if _moved(model, image) > MATTERS:
                    return image
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
            if said[:1] == said[1:]:
                break  # it is not their number
    raise NoImageError("none that is known here")


@torch.no_grad()
def _moved(model: PreTrainedModel, image: Image) -> float:
    """Return how much another image changes the logits, relative to the largest."""
    ids = image.placed(Text.drawn(PROMPT).ids, _BEFORE)
    inputs = image.arguments(ids)
    logits = model(ids, **inputs).logits[:, -1]
    inputs["pixel_values"] = inputs["pixel_values"].flip(0, -1)
    return float((logits - model(ids, **inputs).logits[:, -1]).abs().max() / logits.abs().max())


class _Conversation:
    """A conversation by `generate` with a compressed cache and with the full cache of its judge."""

    def __init__(self, model: PreTrainedModel, policy=POLICY, pieces=None, **options: Any) -> None:
        self.model, self.judge = model, masked_judge(model)
        self.pieces = pieces
        self.cache = CompressedCache(model, policy, **options)
        self.full = DynamicCache(config=self.judge.config.get_text_config(decoder=True))
        self.ids: Tensor | None = None
        self.pads: Tensor | None = None
        self.images = 0
        self.crossed: Image | None = None  # to which later turns attend, too

    def turn(self, text: Text, image: Image | None = None) -> Tensor:
        """Generate after a text with both caches and return the equal logits, (B, NEW + 1, V)."""
        pads = (text.mask == 0).sum(-1)
        self.pads = pads if self.pads is None else self.pads
        ids = text.ids if self.ids is None else torch.cat([self.ids, text.ids], dim=1)
        mask = torch.arange(ids.shape[1]) >= self.pads[:, None]
        inputs = {"attention_mask": mask.long(), "prefill_chunk_size": self.pieces}
        if image is not None:
            inputs |= image.arguments(text.ids) | image.types(ids)
            self._note_grid(inputs, image)
            self.crossed = image if "cross_attention_mask" in inputs else None
        elif self.crossed is not None:
            inputs |= self.crossed.types(ids)
        hidden = [self._hidden()]
        try:
            found = _generate(
                self.model, self.cache, ids, lambda: hidden.append(self._hidden()), inputs
            )
        except Exception as error:
            self._require_judge_does(error, ids, inputs)
            raise
        with hiding_by_step(self.full, hidden) as step:

            def after_step() -> None:
                step()
                hold_as_stored(self.cache, self.full)

            expected = _generate(self.judge, self.full, ids, after_step, inputs)
        logits = torch.stack(found.logits, dim=1)
        require_close(logits, torch.stack(expected.logits, dim=1), "generated")
        self.ids = found.sequences
        return logits

    def _require_judge_does(self, error: Exception, ids: Tensor, inputs: dict[str, Any]) -> None:
        """Raise TransformersError if the cache of transformers fails in this turn, too."""
        if not isinstance(error, SnapKVError):
            try:
                _generate(self.judge, self.full, ids, lambda: None, inputs)
            except Exception:
                raise TransformersError(f"{type(error).__name__}: {error}") from error

    def _note_grid(self, inputs: dict[str, Any], image: Image) -> None:
        """Give positions of three axes the grids of all images, and the last one's features."""
        self.images += 1
        if self.images > 1 and image.kinds == "mm_token_type_ids" and "image_grid_thw" in inputs:
            pixels, grid = inputs.pop("pixel_values"), inputs["image_grid_thw"]
            with torch.no_grad():
                features = self.judge.base_model.get_image_features(pixels, grid, return_dict=True)
            inputs["mm_encoder_outputs"] = {"image": features}
            inputs["image_grid_thw"] = torch.cat([grid] * self.images)

    def _hidden(self) -> dict[int, Tensor]:
        seen = self.cache.get_seq_length()
        return hidden_columns(self.cache, seen, self.pads) if seen else {}


def _generate(model: PreTrainedModel, cache, ids: Tensor, after_step: Callable, inputs) -> Any:
    def stopping(ids, scores, **_: Any) -> Tensor:
        after_step()
        return torch.zeros(len(ids), dtype=torch.bool)

    return model.generate(
        ids,
        **passed(cache),
        max_new_tokens=NEW + 1,
        do_sample=False,
        suppress_tokens=list(range(60, 64)),
        stopping_criteria=[stopping],
        return_dict_in_generate=True,
        output_logits=True,
        **inputs,
    )


def _prompt(image: Image, *lengths: int, seed: int = 0) -> Text:
    """Return rows of these lengths with an image after the first tokens of each."""
    text = Text.drawn(*lengths, seed=seed)
    for row, length in enumerate(lengths):
        start = max(lengths) - length + _BEFORE
        text.ids[row : row + 1] = image.placed(text.ids[row : row + 1], start)
    return text


def read_text(model: PreTrainedModel, image: Image) -> None:
    """Test a text without an image."""
    compressed(model)


def seen(model: PreTrainedModel, image: Image, *way: Any, **options: Any) -> None:
    """Test an image in the prompt."""
    _Conversation(model, *way, **options).turn(_prompt(image, PROMPT), image)


def turns(model: PreTrainedModel, image: Image) -> None:
    """Test an image, text, and a second image before the window, with append and compress."""
    for how in ("append", "compress"):
        conversation = _Conversation(model, turns=how)
        conversation.turn(_prompt(image, PROMPT), image)
        conversation.turn(Text.drawn(11, seed=1))
        tokens = _BEFORE + image.tokens + POLICY.window_size
        conversation.turn(_prompt(image, tokens, seed=2), image)


def padded(model: PreTrainedModel, image: Image) -> None:
    """Test that two padded rows with an image each equal each row alone."""
    text = _prompt(image, PROMPT, PROMPT - 3)
    together, whole = _Conversation(model).turn(text, image), _whole(model, text, image)
    for row, logits in enumerate(together):
        own, conversation = text.row(row), _Conversation(model)
        alone, plain = conversation.turn(own, image)[0], _whole(model, own, image)[0]
        if (plain - whole[row]).abs().max() < CLOSE * plain.abs().max():
            require_close(logits, alone, f"row {row} alone")  # else it is the model's own way


def _whole(model: PreTrainedModel, text: Text, image: Image) -> Tensor:
    """Return the logits of generating with the cache of transformers, (B, NEW + 1, V)."""
    judge = masked_judge(model)
    full = DynamicCache(config=judge.config.get_text_config(decoder=True))
    inputs = {"attention_mask": text.mask} | image.arguments(text.ids)
    return torch.stack(_generate(judge, full, text.ids, lambda: None, inputs).logits, dim=1)


def in_pieces(model: PreTrainedModel, image: Image) -> None:
    """Test a prompt in pieces that divide the image."""
    _Conversation(model, pieces=_BEFORE + 2).turn(_prompt(image, PROMPT), image)


def saved(model: PreTrainedModel, image: Image) -> None:
    """Test that a cache continues like the saved one after loading with a copy of the model."""
    text, cache = _prompt(image, PROMPT), CompressedCache(model, POLICY)
    other = type(model)(copy.deepcopy(model.config)).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model(text.ids, **passed(cache), **image.arguments(text.ids))
        cache.save(Path(folder) / "cache.safetensors")
        loaded = CompressedCache.load(Path(folder) / "cache.safetensors", other)
        token = text.ids[:, :1]
        found = other(token, **passed(loaded)).logits
        require_close(found, model(token, **passed(cache)).logits, "loaded")


IMAGE_CELLS: dict[str, Callable[[PreTrainedModel, Image], None]] = {
    "text": read_text,
    "image": seen,
    "pads": padded,
    "pieces": in_pieces,
    "turns": turns,
    "files": saved,
    "int8": functools.partial(seen, quantize="int8"),
    "AdaKV": functools.partial(seen, policy=AdaKV(POLICY)),
}
"""The tests, by their names in the table."""


def image_row(model_type: str) -> dict[str, Any]:
    """Test a model that accepts images and return every cell, or why none was tested."""
    try:
        model = seeing(model_type)
        image = image_of(model_type)
    except NoImageError as error:
        return {"no_image": str(error)}
    except Exception:
        return {"no_image": "no tiny model that sees"}
    cells = IMAGE_CELLS.items()
    return {
        "images": {name: verdict(functools.partial(cell, model, image)) for name, cell in cells}
    }
