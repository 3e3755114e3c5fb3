"""vLLM with compressed prompts against stock vLLM, with the demo model in this process, in turns.

Import this module before vLLM. One engine works after the other, with the threads that the system
gives them. It needs `make .venv-vllm/.installed`, whose Python runs this experiment.
"""

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from snapkv_app.models import place_of
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.measuring import InterleavedTimings
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.prompts import NeedlePrompt, quoted_document
from snapkv_lab.experiments.records import describe_environment
from snapkv_lab.measure.timing import TimeSpent, measure_time, percentiles
from snapkv_lab.rows import Row, group_rows
from snapkv_vllm import engine_args
from snapkv_vllm.versions import installed

VOTES = {"kernel_size": 13}
BLOCK_TOKENS = 128

_HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"

DTYPE = torch.bfloat16 if _HAS_AVX512 else torch.float32
"""Without AVX-512, a CPU computes bfloat16 many times more slowly than float32."""


class Engine:
    """A vLLM engine in this process that is run step by step.

    Args:
        context: the run, with the model and the lengths of prompts and answers.
        budget: the tokens that the plugin keeps; None for stock vLLM.
        blocks: the size of the cache, in blocks of `BLOCK_TOKENS` tokens in `DTYPE`.
        cache_dtype: vLLM's `kv_cache_dtype`.
        caches_prefixes: whether vLLM's prefix caching is on.
    """

    def __init__(
        self,
        context: RunContext,
        budget: int | None,
        blocks: int,
        cache_dtype: str = "auto",
        *,
        caches_prefixes: bool = False,
    ) -> None:
        from vllm import LLM

        text = context.loaded.model.config
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim  # per token
        options: dict[str, Any] = {
            "dtype": str(DTYPE).removeprefix("torch."),
            "kv_cache_dtype": cache_dtype,
            "max_model_len": context.prompt_tokens + context.new_tokens,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": blocks * BLOCK_TOKENS * numbers * DTYPE.itemsize,
            "enable_prefix_caching": caches_prefixes,
            "max_num_batched_tokens": 2048,
            "enforce_eager": True,
            "disable_log_stats": True,
        }
        if budget is not None:
            options = engine_args(budget=budget, policy="snapkv", parameters=VOTES, **options)
        self.llm = LLM(place_of(context.model), **options)
        self.core = self.llm.llm_engine.engine_core.engine_core
        schedule, self._computed = self.core.scheduler.schedule, list[int]()

        def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            self._computed = list(scheduled.num_scheduled_tokens.values())
            return scheduled

        self.core.scheduler.schedule = schedule_and_note

    def answers(self, prompts: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], Row]:
        """Return greedy answers to prompts that are sent at once, and the times of the steps.

        Args:
            prompts: the token ids of each prompt.
            tokens: the length of every answer.

        Returns:
            The token ids of the answers, in the order of the prompts; and "prefill_seconds",
            "decode_seconds", "decode_steps", and "most_running", the most requests in a step. A
            step that reads any part of a prompt counts as prefill.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens)
        engine = self.llm.llm_engine
        for number, ids in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
        answers: dict[int, list[int]] = {}
        prefill, decode, running = [], [], []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = engine.step()
            times = prefill if any(count > 1 for count in self._computed) else decode
            times.append(time.perf_counter() - start)
            running.append(len(self._computed))
            for one in outputs:
                answers[int(one.request_id)] = list(one.outputs[0].token_ids)
        return [answers[number] for number in range(len(prompts))], {
            "prefill_seconds": round(sum(prefill), 2),
            "decode_seconds": round(sum(decode), 2),
            "decode_steps": len(decode),
            "most_running": max(running),
        }

    def close(self) -> None:
        """Shut vLLM down and release its memory. The engine cannot be used after that."""
        self.core.shutdown()
        del self.llm, self.core
        gc.collect()


@contextlib.contextmanager
def _warm_engines(
    context: RunContext, blocks: int, prompt: list[int], **more: dict[str, Any]
) -> Iterator[dict[str, Engine]]:
    """Start all engines, warm them up with a prompt, and close them at the end of the block.

    Args:
        context: the run.
        blocks: the size of each cache in blocks.
        prompt: the token ids that each engine answers once.
        more: the options of further engines by their names.

    Yields:
        The engines by name: "stock" for stock vLLM, "snapkv" for the plugin, and the further ones.
    """
    options = {"stock": {"budget": None}, "snapkv": {"budget": context.budget}} | more
    engines = {name: Engine(context, blocks=blocks, **own) for name, own in options.items()}
    for engine in engines.values():
        engine.answers([prompt], 2)
    yield engines
    for engine in engines.values():
        engine.close()


def _describe_run(context: RunContext) -> Row:
    own = {"attn_implementation": "vLLM CPU_ATTN", "dtype": str(DTYPE).removeprefix("torch.")}
    environment = describe_environment() | {"vllm": installed()}
    return {"model": context.loaded.description() | own, "environment": environment}


def _reading(context: RunContext) -> Iterator[Row]:
    """Yield one row with the time until the first token of a prompt for both engines.

    Each prompt is sent alone, and the engines take turns.
    """
    documents = context.documents(context.prompt_tokens, context.requests)
    prompts = [document.prompt_ids for document in documents]
    tokens = context.prompt_tokens + context.new_tokens
    blocks = context.requests * -(-tokens // BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    with _warm_engines(context, blocks, prompts[0]) as engines:
        work = {name: _read(engine, prompts) for name, engine in engines.items()}
        turns = InterleavedTimings(work, rounds=context.pairs)
    row: Row = {
        "prompts_at_once": 1,
        "prompt_tokens": context.prompt_tokens,
        "pairs": context.pairs,
        "budget": context.budget,
        "blocks": blocks,
    }
    for key, clock in (("", "wall_ms"), ("processor_", "cpu_ms")):
        for name in turns:
            seconds = [ms / 1000 for ms in turns.samples(name, clock)]
            row[f"{name}_{key}seconds"] = percentiles(seconds, 4)
        row[f"{key}against_stock"] = turns.ratio("snapkv", "stock", clock=clock)
    yield row


def _read(engine: Engine, prompts: list[list[int]]) -> Callable[[], object]:
    again = itertools.cycle(prompts)
    return lambda: engine.answers([next(again)], 1)


def _speed(context: RunContext) -> Iterator[Row]:
    """Yield a row for each round and engine with the time to answer the same requests at once.

    The engines take turns, and all pools have equally many bytes.
    """
    documents = context.documents(context.prompt_tokens, context.requests)
    prompts = [document.prompt_ids for document in documents]
    budgets = {"stock": None, "snapkv": context.budget}
    fp8: dict[str, Any] = {}
    if _HAS_AVX512:  # vLLM supports fp8 on no other CPU
        coded = {"cache_dtype": "fp8"}
        fp8 = {f"{name}, fp8": coded | {"budget": own} for name, own in budgets.items()}
    with _warm_engines(context, context.blocks, prompts[0], **fp8) as engines:
        for number in range(context.rounds):
            for name in list(engines)[:: -1 if number % 2 else 1]:
                start, processor = time.perf_counter(), time.process_time()
                answers, steps = engines[name].answers(prompts, context.new_tokens)
                seconds = time.perf_counter() - start
                yield {
                    "engine": name,
                    "round": number,
                    "requests": context.requests,
                    "prompt_tokens": context.prompt_tokens,
                    "new_tokens": context.new_tokens,
                    "blocks": context.blocks,
                    "budget": budgets[name.partition(",")[0]],
                    "seconds": round(seconds, 2),
                    "processor_seconds": round(time.process_time() - processor, 2),
                    **steps,
                    "needles": _count_right(documents, answers),
                }


def _questions(context: RunContext) -> Iterator[Row]:
    """Yield a row for each engine with the time to answer several questions about the same text.

    Only the first question reads the text, and the others find it in the prefix cache.
    """
    document = quoted_document(
        context.loaded.tokenizer,
        load_haystack().text,
        tokens=context.prompt_tokens,
        questions=context.questions,
    )
    prompts = [[*document.ids, *quote.question_ids] for quote in document.quotes]
    blocks = 2 * -(-(context.prompt_tokens + context.new_tokens) // BLOCK_TOKENS) + 1
    engines = {
        name: Engine(context, budget, blocks, caches_prefixes=True)
        for name, budget in (("stock", None), ("snapkv", context.budget))
    }
    took: dict[str, list[list[TimeSpent]]] = {name: [] for name in engines}
    right: dict[str, int] = {}
    for engine in engines.values():  # warms up with a shorter text, which is also compressed
        engine.answers([document.ids[: 2 * context.budget]], 2)
    for _ in range(context.readings):
        for name, engine in engines.items():
            engine.llm.reset_prefix_cache()
            answered = [_time_answer(engine, ids) for ids in prompts]
            took[name].append([spent for _, spent in answered])
            pairs = zip(answered, document.quotes, strict=True)
            right[name] = sum(answer == quote.answer_ids for (answer, _), quote in pairs)
    for name, engine in engines.items():
        engine.close()
        yield {
            "engine": name,
            "questions": context.questions,
            "prompt_tokens": context.prompt_tokens,
            "budget": context.budget if name == "snapkv" else None,
            "readings": context.readings,
            **_percentile_fields("first", [first for first, *_ in took[name]]),
            **_percentile_fields("other", [one for _, *others in took[name] for one in others]),
            "right": right[name],
        }


def _percentile_fields(which: str, spent: Sequence[TimeSpent]) -> Row:
    """Return two fields of a row: the percentiles of the seconds by the clock, and of those of all
    threads together.

    Args:
        which: the beginning of the names of the fields, which end with "_seconds" and
            "_processor_seconds".
        spent: the times, at least two.
    """
    return {
        f"{which}_seconds": percentiles([one.wall_ms / 1000 for one in spent], 3),
        f"{which}_processor_seconds": percentiles([one.cpu_ms / 1000 for one in spent], 3),
    }


def _time_answer(engine: Engine, ids: list[int]) -> tuple[list[int], TimeSpent]:
    """Return the first four tokens of an answer, as many as a quotation has, and their time."""
    answers: list[list[int]] = []
    spent = measure_time(lambda: answers.extend(engine.answers([ids], 4)[0]))
    return answers[0], spent


def _count_right(documents: Sequence[NeedlePrompt], answers: Sequence[list[int]]) -> int:
    pairs = zip(documents, answers, strict=True)
    return sum(answer[: len(one.answer_ids)] == one.answer_ids for one, answer in pairs)


_MEDIANS = ("seconds", "prefill_seconds", "decode_seconds", "decode_steps", "most_running")


def _median_rows(rows: list[Row]) -> Iterable[Row]:
    """Yield a row for each engine. Its times, its numbers of steps and its right answers are
    medians over the rounds, and its other fields are those of the first round.
    """
    for own in group_rows(rows, "engine").values():
        yield own[0] | {key: median(row[key] for row in own) for key in (*_MEDIANS, "needles")}


def _engine_name(row: Row) -> str:
    return row["engine"] + (f", budget {row['budget']}" if row["budget"] else "")


SERVING = Experiment(
    name="serving",
    title="Serving: stock vLLM and compressed prompts",
    duration="hours",
    measure={"reading": _reading, "speed": _speed, "questions": _questions},
    options={
        "requests": Size(16, 3),
        "prompt_tokens": Size(4000, 600),
        "new_tokens": Size(256, 64),
        "blocks": Size(112, 12),
        "rounds": Size(2, 1),
        "budget": Size(512, 128),
        "pairs": Size(16, 2),
        "questions": Size(8, 2),
        "readings": Size(3, 2),
    },
    fields={"votes": VOTES},
    describe=_describe_run,
    tables=[
        Listing(
            {
                "blocks": "{blocks}",
                "engine": _engine_name,
                "seconds": "{seconds:.1f}",
                "prefill s": "{prefill_seconds:.1f}",
                "decode s": "{decode_seconds:.1f}",
                "decode steps": "{decode_steps:.0f}",
                "most at once": "{most_running:.0f}",
                "found": "{needles:.0f}/{requests}",
            },
            "{requests} requests of {prompt_tokens:,} tokens at once",
            {"part": "speed"},
            _median_rows,
        ),
        Listing(
            {
                "prompt tokens": "{prompt_tokens:,}",
                "stock": "{stock_seconds[p50]:.2f} s",
                "snapkv": "{snapkv_seconds[p50]:.2f} s",
                "ratio": "{against_stock:spread|.3f}",
                "of processor time": "{processor_against_stock:spread|.3f}",
            },
            "Reading a prompt alone, in pairs",
            {"part": "reading"},
        ),
        Listing(
            {
                "engine": _engine_name,
                "first": "{first_seconds[p50]:.2f} s",
                "each of the others": "{other_seconds[p50]:.2f} s",
                "first, processor time": "{first_processor_seconds[p50]:.2f} s",
                "each of the others, processor time": "{other_processor_seconds[p50]:.2f} s",
                "right": "{right}/{questions}",
            },
            "{questions} questions on one text of {prompt_tokens:,} tokens",
            {"part": "questions"},
        ),
    ],
)
