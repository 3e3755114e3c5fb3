"""The text behind every token of a prompt."""

from typing import Any

from snapkv.app.prompts import Prompt


def token_texts(tokenizer: Any, prompt: Prompt) -> list[str]:
    """One text per token; together they are the prompt's text, character by character.

    Where several tokens make one character, the first of them has it and the others are empty, as
    are tokens that the tokenizer adds. A tokenizer that does not know where its tokens come from
    has each token decoded alone.
    """
    encoded = tokenizer(
        prompt.text,
        add_special_tokens=not prompt.has_special_tokens,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,
    )
    if not tokenizer.is_fast:
        return [tokenizer.decode([index]) for index in encoded["input_ids"]]
    starts, reached = [], 0
    for start, _ in encoded["offset_mapping"]:
        reached = max(reached, start)
        starts.append(reached)
    stops = [*starts[1:], len(prompt.text)]
    return [prompt.text[start:stop] for start, stop in zip(starts, stops, strict=True)]
