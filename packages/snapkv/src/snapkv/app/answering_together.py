"""Answers to several prompts, read and generated in one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from snapkv.app.answering import (
    end_token_ids,
    first_stop,
    generate_options,
    prompt_ids,
    stopping,
)
from snapkv.app.models import LoadedModel
from snapkv.app.prompts import Prompt
from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError
from snapkv.hf.cache import CompressedCache
from snapkv.kvzip import require_one_reading
from snapkv.plan import out_of_memory_explained
from snapkv.policies import Policy


def answers_together(
    loaded: LoadedModel, prompts: Sequence[Prompt], policy: Policy, settings: GenerationSettings
) -> list[str]:
    """The text of every answer; each is that of its prompt alone, up to rounding."""
    if settings.temperature:
        raise InvalidArgumentError(
            f"temperature: expected 0 for answers that are generated together, got "
            f"{settings.temperature}; ask the prompts one by one"
        )
    require_one_reading(policy, "ask the prompts one by one, with the question hidden from it")
    model, tokenizer = loaded.model, loaded.tokenizer
    rows = [prompt_ids(loaded, prompt, settings)[0] for prompt in prompts]
    options, ends = generate_options(model, settings), end_token_ids(model, settings)
    ids = _left_padded(rows, next(iter(ends), 0))
    cache = CompressedCache(model, loaded.completed(policy))
    advice = (
        f"prompts: expected a batch that the device has memory for, got {len(rows)} of up to "
        f"{ids.shape[1]:,} tokens; answer fewer at once"
    )
    with out_of_memory_explained(lambda: advice):
        output: Tensor = model.generate(
            ids,
            attention_mask=_left_padded([torch.ones_like(row) for row in rows], 0),
            past_key_values=cache,
            stopping_criteria=stopping(loaded, settings),
            **options,
        )
    texts = []
    for prompt, new_ids in zip(prompts, output[:, ids.shape[1] :].tolist(), strict=True):
        text = tokenizer.decode(until_end(new_ids, ends), skip_special_tokens=True)
        texts.append(prompt.answer_start + text[: first_stop(text, settings.stop_strings)])
    return texts


def _left_padded(rows: Sequence[Tensor], pad: int) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=pad, padding_side="left")


def until_end(token_ids: list[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Generated tokens up to the first that ends an answer, that one included."""
    stops = [place for place, token in enumerate(token_ids) if token in ends]
    return tuple(token_ids[: stops[0] + 1] if stops else token_ids)
