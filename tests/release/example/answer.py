"""A project that uses the package, checked by mypy against the installed package."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import snapkv


def answer(model_name: str, path: Path, question: str) -> str:
    """The model's answer about a file, from at most 1,024 positions per head."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name)
    inputs = tokenizer(f"{path.read_text('utf-8')}\n\n{question}\n", return_tensors="pt")
    cache = snapkv.CompressedCache(model, snapkv.SnapKV(budget=1024))
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    kept: float = cache.report().kept_tokens
    assert kept > 0
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def refused(text: str) -> str | None:
    """What is said of a budget that is none."""
    try:
        snapkv.SnapKV(budget=int(text))
    except snapkv.InvalidArgumentError as error:
        return str(error)
    return None
