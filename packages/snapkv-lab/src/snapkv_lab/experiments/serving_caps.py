"""Needles under a cap in vLLM, beside the library's answers to the same prompts.

Documents, method and caps are those of `snapkv_lab.experiments.chunked`. Needs `make
.venv-vllm/.installed`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from snapkv import CompressedCache
from snapkv.app.models import LoadedModel
from snapkv.prefill import chunked
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.chunked import CAPS, CHUNK_TOKENS, DOCUMENTS, POLICY, PROMPT_TOKENS
from snapkv_lab.experiments.engine import Engine, measured_on
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, table
from snapkv_lab.experiments.magic_number import Document, make_documents
from snapkv_lab.experiments.records import Row
from snapkv_vllm import Limits, engine_args


def served(documents: Sequence[Document], cap: int | None) -> list[list[int]]:
    """Greedy answers of an engine that holds prompts to the cap; None for no cap."""
    from vllm import SamplingParams

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
    )
    engine = Engine(**options)
    prompts: list[Any] = [{"prompt_token_ids": one.prompt_ids} for one in documents]
    tokens = len(documents[0].answer_ids)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    engine.close()
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


def measure(given: Given) -> Iterator[Row]:
    """One row per cap."""
    documents = make_documents(
        given.loaded.tokenizer, load_haystack(), prompt_tokens=PROMPT_TOKENS, count=DOCUMENTS
    )
    common = {
        "policy": POLICY.describe(),
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "documents": DOCUMENTS,
        **measured_on(given.loaded),
    }
    for cap in CAPS:
        ours = served(documents, cap)
        theirs = [of_the_library(given.loaded, document, cap) for document in documents]
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


EXPERIMENT = Experiment(
    name="serving_caps",
    title="Needles under a cap, in vLLM",
    measure=measure,
    tables=lambda rows: [
        "## {documents} documents of {prompt_tokens:,} tokens, budget {policy[budget]}".format_map(
            rows[0]
        ),
        table(
            rows,
            {
                "cap": lambda row: str(row["cap_tokens"] or "none"),
                "right in vLLM": "{right_answers} of {documents}",
                "right in the library": "{right_in_the_library} of {documents}",
                "the same answer": "{same_answers} of {documents}",
            },
        ),
    ],
    shown={
        "caps": Shown(
            "8 documents of 1,024 tokens, budget 128",
            ("cap", "right in vLLM", "right in the library"),
            ("none", "256", "128"),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
