"""How the paper's LongBench run wrapped its prompts, which is not by the tokenizers' templates.

Mistral and Mixtral got the bare text, Llama 2 and LWM the instruction brackets without a system
message, Vicuna and LongChat the conversation they were trained on.
"""

from pathlib import PurePath
from typing import Any

from snapkv.errors import InvalidArgumentError

_INSTRUCTION = ("[INST]", "[/INST]")
_CONVERSATION = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: ",
    " ASSISTANT:",
)
_AROUND = {
    "longchat": _CONVERSATION,
    "vicuna": _CONVERSATION,
    "llama2": _INSTRUCTION,
    "llama-2": _INSTRUCTION,
    "lwm": _INSTRUCTION,
    "mistral": ("", ""),
    "mixtral": ("", ""),
}


def around_turn(tokenizer: Any) -> tuple[str, str]:
    """What stood before and behind a prompt for the tokenizer's model, which its name tells.

    Raises:
        InvalidArgumentError: the paper's run had no such model.
    """
    name = PurePath(tokenizer.name_or_path).name.lower()
    for family, around in _AROUND.items():
        if family in name:
            return around
    raise InvalidArgumentError(
        f"template: expected a model named like {', '.join(_AROUND)} for longbench, got {name!r}; "
        "use the template tokenizer or none"
    )
