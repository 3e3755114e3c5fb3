"""Few bits for what is kept: right answers, bytes and time per token, with eviction and without.

The documents are those of the quality benchmark: one magic number in a long text, asked for at its
end.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from snapkv import FullCache, SnapKV
from snapkv.policies import Policy
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.decode import decoder
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, table
from snapkv_lab.experiments.magic_number import SEED, Document, make_documents
from snapkv_lab.experiments.reading import ReadPrompt, read_prompt, score_answer
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.timing import alternate, ratios, spread

PROMPT_TOKENS, DOCUMENTS, BUDGET, TIMED_TOKENS = 2048, 8, 512, 48
BITS = (None, "int8", "fp8", "int4")


def policies(budget: int) -> dict[str, Policy]:
    """Without eviction, and with it."""
    return {"full cache": FullCache(), "SnapKV": SnapKV(budget, window_size=16, kernel_size=13)}


@torch.inference_mode()
def measure(
    model: Any, documents: Sequence[Document], *, budget: int = BUDGET, tokens: int = TIMED_TOKENS
) -> Iterator[Row]:
    """A row per policy and kind of bits; times are of the last document."""
    cells = [(name, policy, bits) for name, policy in policies(budget).items() for bits in BITS]
    scores: list[list[Any]] = [[] for _ in cells]
    for document in documents:
        prompt = read_prompt(model, document.prompt_ids)
        for (_, policy, bits), of_cell in zip(cells, scores, strict=True):
            cache = prompt.compressed(policy, quantize=bits)
            held = cache.report().held_bytes
            of_cell.append((score_answer(prompt, cache, document.answer_ids), held))
    times = _times(prompt, cells, tokens)
    for (name, policy, bits), of_cell in zip(cells, scores, strict=True):
        yield {
            "benchmark": "bits",
            "cache": name,
            "bits": bits,
            "policy": policy.describe(),
            "prompt_tokens": len(documents[0].prompt_ids),
            "documents": len(documents),
            "right_answers": sum(score.right for score, _ in of_cell),
            "nll": round(fmean(score.nll for score, _ in of_cell), 4),
            "held_bytes": round(fmean(held for _, held in of_cell)),
            "tokens": tokens,
            "ms_per_token": spread(times[name, bits], 2),
            "against_whole": spread(ratios(times[name, bits], times[name, None]), 4),
        }


def _times(
    prompt: ReadPrompt, cells: Sequence[tuple[str, Policy, Any]], tokens: int
) -> dict[tuple[str, Any], list[float]]:
    decoders = {
        (name, bits): decoder(prompt, prompt.compressed(policy, quantize=bits))
        for name, policy, bits in cells
    }
    return alternate(decoders, rounds=tokens, warmup_rounds=4)


def _measured(given: Given) -> Iterator[Row]:
    documents = make_documents(
        given.loaded.tokenizer, load_haystack(), prompt_tokens=PROMPT_TOKENS, count=DOCUMENTS
    )
    return (row | {"seed": SEED} for row in measure(given.loaded.model, documents))


EXPERIMENT = Experiment(
    name="bits",
    title="Few bits for what is kept",
    takes="three minutes",
    measure=_measured,
    tables=lambda rows: [
        table(
            rows,
            {
                "cache": lambda row: f"{row['cache']}, {row['bits'] or row['model']['dtype']}",
                "held": "{held_bytes:bytes}",
                "right answers": "{right_answers} of {documents} ({nll:.2f})",
                "ms per token": "{ms_per_token[p50]:.1f}",
                "against its own dtype": "{against_whole[p50]:.2f}",
            },
        )
    ],
    shown={
        "bits": Shown(
            "Few bits for what is kept",
            ("cache", "held", "right answers", "ms per token", "against its own dtype"),
            ("full cache, float32", "SnapKV, float32", "SnapKV, int8", "SnapKV, int4"),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
