"""What the first tokens are worth to methods that rate without a question.

Stretches of the haystack are compressed with and without sinks, and the text that follows is read
from what was kept: a part of `snapkv_lab.experiments.methods`.
"""

import random
import sys
from collections.abc import Iterator
from statistics import fmean

from snapkv import FullCache
from snapkv.app.models import LoadedModel
from snapkv.policies import AdaKV, KeyDiff, KVzip, Policy, Random
from snapkv.policies.kvzip import INSTRUCTION
from snapkv_lab.evaluate.haystack import Haystack
from snapkv_lab.experiments.contenders import WINDOW_SIZE
from snapkv_lab.experiments.magic_number import SEED, stretch
from snapkv_lab.experiments.reading import read_prompt_twice
from snapkv_lab.experiments.records import Row, markdown_table
from snapkv_lab.experiments.scoring import score_answer

PROMPT_TOKENS, BUDGETS, SINKS = 768, (64, 192, 384), (0, 4)
STRETCHES, FOLLOWING_TOKENS = 8, 256


def contenders(budget: int, sink_tokens: int) -> dict[str, Policy]:
    """Methods that look at no question, with so many sinks."""
    kvzip = KVzip(budget, window_size=WINDOW_SIZE, sink_tokens=sink_tokens)
    return {
        "KVzip": kvzip,
        "AdaKV(KVzip)": AdaKV(kvzip),
        "KeyDiff": KeyDiff(budget, window_size=WINDOW_SIZE, sink_tokens=sink_tokens),
        "Random": Random(budget, window_size=WINDOW_SIZE, sink_tokens=sink_tokens),
    }


def measure_first_tokens(loaded: LoadedModel, haystack: Haystack) -> Iterator[Row]:
    """The loss of what follows a text, from every cache."""
    compared: list[tuple[str, int | None, int | None, Policy]] = [
        ("full cache", None, None, FullCache()),
        *(
            (name, budget, sinks, policy)
            for budget in BUDGETS
            for sinks in SINKS
            for name, policy in contenders(budget, sinks).items()
        ),
    ]
    losses: list[list[float]] = [[] for _ in compared]
    repeat = loaded.tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    for number in range(STRETCHES):
        print(f"text {number + 1} of {STRETCHES}", file=sys.stderr)
        draw = random.Random(f"{SEED}/first tokens/{number}")
        ids = stretch(loaded.tokenizer, haystack.text, PROMPT_TOKENS + FOLLOWING_TOKENS, draw)
        prompt = read_prompt_twice(
            loaded.model, ids[:PROMPT_TOKENS], policy=KVzip(), instruction_ids=repeat
        )
        for (*_, policy), of_policy in zip(compared, losses, strict=True):
            score = score_answer(prompt, prompt.compressed(policy), ids[PROMPT_TOKENS:])
            of_policy.append(score.nll / (FOLLOWING_TOKENS - 1))
    for (name, budget, sinks, policy), of_policy in zip(compared, losses, strict=True):
        yield {
            "task": "text that follows",
            "prompt_tokens": PROMPT_TOKENS,
            "following_tokens": FOLLOWING_TOKENS,
            "texts": STRETCHES,
            "method": name,
            "budget": budget,
            "sink_tokens": sinks,
            "policy": policy.describe(),
            "loss": round(fmean(of_policy), 4),
            "losses": [round(loss, 4) for loss in of_policy],
        }


def section(rows: list[Row]) -> list[str]:
    """Loss by method, budget and sinks, that of the full cache first."""
    losses = {(row["method"], row["budget"], row["sink_tokens"]): row["loss"] for row in rows}
    columns = [(budget, sinks) for budget in BUDGETS for sinks in SINKS]
    methods = list(dict.fromkeys(row["method"] for row in rows if row["budget"]))
    table = markdown_table(
        ["method", *(f"{budget} tokens, {sinks} sinks" for budget, sinks in columns)],
        [
            ["full cache", *[f"{rows[0]['loss']:.3f}"] * len(columns)],
            *([name, *(f"{losses[name, *column]:.3f}" for column in columns)] for name in methods),
        ],
    )
    return ["## First tokens", table]
