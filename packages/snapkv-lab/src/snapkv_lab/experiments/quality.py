"""Quality of every method on the retrieval task, at several budgets and prompt lengths."""

import sys
from collections.abc import Iterator
from dataclasses import asdict

from snapkv import FullCache, Random, SnapKV
from snapkv.policies import Policy
from snapkv.validation import format_bytes
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.contenders import SinksAndRecent
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, pivot
from snapkv_lab.experiments.magic_number import SEED, make_documents
from snapkv_lab.experiments.records import (
    Row,
)
from snapkv_lab.experiments.retrieval import measure_retrieval

DOCUMENTS = {768: 24, 2048: 12, 4096: 8}
"""How many documents are read at each prompt length."""

BUDGETS = (96, 128, 256, 512)


def policies_at(budget: int) -> list[Policy]:
    """Every method of the comparison at one budget."""
    windows_and_kernels = [(window, kernel) for window in (16, 32) for kernel in (1, 5, 7, 13)]
    maxima = [
        SnapKV(budget, window_size=window, kernel_size=kernel)
        for window, kernel in windows_and_kernels
    ]
    averages = [
        SnapKV(budget, window_size=16, kernel_size=kernel, pooling="avg") for kernel in (5, 7, 13)
    ]
    return [
        *maxima,
        *averages,
        SinksAndRecent(budget, window_size=16),
        Random(budget, window_size=16),
    ]


def measure(given: Given) -> Iterator[Row]:
    """Read and answer all documents, shortest prompts first."""
    loaded, haystack = given.loaded, load_haystack()
    policies = [FullCache(), *(policy for budget in BUDGETS for policy in policies_at(budget))]
    for prompt_tokens, count in DOCUMENTS.items():
        print(f"{count} documents of {prompt_tokens} tokens", file=sys.stderr)
        documents = make_documents(
            loaded.tokenizer, haystack, prompt_tokens=prompt_tokens, count=count
        )
        for outcome in measure_retrieval(loaded.model, documents, policies):
            yield {
                "task": "magic number",
                "haystack": haystack.name,
                "prompt_tokens": prompt_tokens,
                "seed": SEED,
                "policy": outcome.policy.name,
                "settings": asdict(outcome.policy),
                "documents": outcome.documents,
                "accuracy": round(outcome.accuracy, 4),
                "nll": round(outcome.nll, 4),
                "held_bytes": outcome.held_bytes,
                "full_bytes": outcome.full_bytes,
            }


def _tables(rows: list[Row]) -> Iterator[str]:
    """For each prompt length methods by budgets, the full cache first."""
    for tokens in sorted({row["prompt_tokens"] for row in rows}):
        full, *others = sorted(
            of(rows, prompt_tokens=tokens), key=lambda row: row["policy"] != "full"
        )
        everywhere = [{"budget": row["settings"]["budget"], **row} for row in others]
        yield f"## {tokens:,} tokens, {full['documents']} documents"
        yield pivot(
            [
                *(
                    {**each, **full, "label": "full cache", "cell": _cell(full)}
                    for each in everywhere
                ),
                *({**each, "label": _label(each), "cell": _cell(each)} for each in everywhere),
                *(
                    {**each, "label": label, "cell": format_bytes(row[key])}
                    for label, key in _BYTES.items()
                    for each in everywhere
                    for row in (each if key == "held_bytes" else full,)
                ),
            ],
            "method",
            "{label}",
            "budget {budget}",
            "{cell}",
        )


_BYTES = {"keys and values held": "held_bytes", "of the full cache": "full_bytes"}


def _cell(row: Row) -> str:
    return f"{row['accuracy']:.2f} ({row['nll']:.2f})"


def _label(row: Row) -> str:
    settings = row["settings"]
    if row["policy"] in ("random", "sinks_and_recent"):
        return str(row["policy"]).replace("_", " ")
    window = f"SnapKV, window {settings['window_size']}"
    if settings["kernel_size"] == 1:
        return f"{window}, no pooling"
    kind = "max" if settings["pooling"] == "max" else "average"
    return f"{window}, {kind} {settings['kernel_size']}"


EXPERIMENT = Experiment(
    name="quality",
    title="One magic number in a long text",
    measure=measure,
    tables=_tables,
    shown={
        "kernels": Shown(
            "4,096 tokens, 8 documents",
            ("method", "budget 256", "budget 512"),
            (
                "full cache",
                "SnapKV, window 16, max 13",
                "SnapKV, window 16, max 7",
                "SnapKV, window 16, no pooling",
                "random",
                "keys and values held",
            ),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
