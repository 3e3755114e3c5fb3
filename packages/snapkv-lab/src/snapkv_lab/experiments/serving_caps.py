"""Needles under a cap in vLLM, beside the library's answers to the same prompts.

    .venv-vllm/bin/python -m snapkv_lab.experiments serving_caps  measure and render the page
    .venv-vllm/bin/python -m snapkv_lab.experiments serving_caps --render
        only render it from the rows

Documents, method and caps are those of `snapkv_lab.experiments.chunked`. Needs `make
.venv-vllm/.installed`. Rows: `docs/results/serving_caps.jsonl`. Page:
`docs/results/tables/serving_caps.md`.
"""

import os

# One engine after the other in this process, threads as the system gives them.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from snapkv import CompressedCache
from snapkv.app.models import LoadedModel, load, place_of
from snapkv.prefill import chunked
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.chunked import CAPS, CHUNK_TOKENS, DOCUMENTS, POLICY, PROMPT_TOKENS
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.magic_number import SEED, Document, make_documents
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    tables_page,
)
from snapkv_vllm import Limits, engine_args
from snapkv_vllm.versions import installed

ROWS = RESULTS / "serving_caps.jsonl"
PAGE = TABLES / "serving_caps.md"


def served(documents: Sequence[Document], cap: int | None) -> list[list[int]]:
    """Greedy answers of an engine that holds prompts to the cap; None for no cap."""
    from vllm import LLM, SamplingParams

    parameters = {"window_size": POLICY.window_size, "kernel_size": POLICY.kernel_size}
    limits = Limits() if cap is None else Limits(cap=cap, chunk_tokens=CHUNK_TOKENS)
    options = engine_args(
        budget=POLICY.budget,
        parameters=parameters,
        limits=limits,
        dtype="float32",
        max_model_len=2 * PROMPT_TOKENS,
        kv_cache_memory_bytes=300 << 20,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=True,
    )
    engine = LLM(place_of("demo"), **options)
    prompts: list[Any] = [{"prompt_token_ids": one.prompt_ids} for one in documents]
    tokens = len(documents[0].answer_ids)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    engine.llm_engine.engine_core.engine_core.shutdown()
    del engine
    gc.collect()
    return [list(output.outputs[0].token_ids) for output in outputs]


def of_the_library(loaded: LoadedModel, document: Document, cap: int | None) -> list[int]:
    """The library's greedy answer, which `generate` gives under the same cap."""
    model, tokens = loaded.model, len(document.answer_ids)
    prompt = torch.tensor([document.prompt_ids])
    pieces: AbstractContextManager[None] = nullcontext()
    if cap is not None:
        pieces = chunked(model, cap_tokens=cap, chunk_tokens=CHUNK_TOKENS)
    with pieces:
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=CompressedCache(model, POLICY),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
    answer: list[int] = output[0, prompt.shape[1] :].tolist()
    return answer


def measure() -> Iterator[Row]:
    """One row per cap."""
    loaded = load("demo")
    documents = make_documents(
        loaded.tokenizer,
        load_haystack(),
        prompt_tokens=PROMPT_TOKENS,
        count=DOCUMENTS,
        seed=SEED,
    )
    common = {
        "policy": POLICY.describe(),
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "documents": DOCUMENTS,
        "model": loaded.description() | {"attn_implementation": "vLLM CPU_ATTN"},
        "environment": describe_environment() | {"vllm": installed()},
    }
    for cap in CAPS:
        ours = served(documents, cap)
        theirs = [of_the_library(loaded, document, cap) for document in documents]
        yield common | {
            "cap_tokens": cap,
            "right_answers": _right(documents, ours),
            "right_in_the_library": _right(documents, theirs),
            "same_answers": sum(map(list.__eq__, ours, theirs)),
        }


def _right(documents: Sequence[Document], answers: Sequence[list[int]]) -> int:
    return sum(
        answer == document.answer_ids for answer, document in zip(answers, documents, strict=True)
    )


def render(rows: Sequence[Row]) -> str:
    """The table of these rows."""
    lines = [
        (
            "none" if row["cap_tokens"] is None else str(row["cap_tokens"]),
            f"{row['right_answers']} of {row['documents']}",
            f"{row['right_in_the_library']} of {row['documents']}",
            f"{row['same_answers']} of {row['documents']}",
        )
        for row in rows
    ]
    header = ("cap", "right in vLLM", "right in the library", "the same answer")
    return tables_page(
        "serving_caps",
        "Needles under a cap, in vLLM",
        environment_line(rows),
        f"## {rows[0]['documents']} documents of {rows[0]['prompt_tokens']:,} tokens, "
        f"budget {rows[0]['policy']['budget']}",
        markdown_table(header, lines),
    )


if __name__ == "__main__":
    measure_or_render(__doc__, measure, render, rows=ROWS, page=PAGE)
