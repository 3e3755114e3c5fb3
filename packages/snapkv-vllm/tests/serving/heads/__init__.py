from snapkv import AdaKV, SnapKV
from snapkv_vllm.plans import EndOfPrompt, room_tokens

PARTED = EndOfPrompt(AdaKV(SnapKV(64)))


def held_tokens(kept_tokens, prompt_tokens, block_tokens):
    """Tokens that are counted for heads that keep so many on average."""
    return room_tokens(PARTED, kept_tokens, prompt_tokens, block_tokens)
