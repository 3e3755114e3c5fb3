"""Sessions of an agent in vLLM: every turn sends the whole history, and adds what a tool has said.

The plugin goes on from the history that it holds compressed, stock vLLM from its cached prefix; the
two engines are there all the time, and each answers every turn. At the end stock vLLM also
reads the last prompt again. Random words of the demo's prose stand for the tools' results: what is
measured is time and room. Import this before vLLM, as `snapkv_lab.experiments.serving` says.
"""

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.records import Row
from snapkv_lab.experiments.serving import VOTES, Engine, _on
from snapkv_lab.measure.timing import spent_on
from snapkv_vllm import engine_args
from snapkv_vllm.agents.held import Sessions

BLOCK_TOKENS = 32
OWN = {"extra_args": {"snapkv_session": "agent"}}
AGAIN = {"skip_reading_prefix_cache": True}

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
"""Of SmolLM2-360M; its weights are random here."""


def _options(given: Given, token_bytes: int, most_tokens: int) -> Row:
    blocks = 2 * -(-most_tokens // BLOCK_TOKENS)
    return {
        "dtype": "bfloat16",
        "max_model_len": most_tokens,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": blocks * BLOCK_TOKENS * token_bytes,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 2048,
    }


def _measured(model: str, given: Given, token_bytes: int, **more: Any) -> Iterator[Row]:
    texts = _texts(given)
    most = sum(map(len, texts)) + (given.turns + 1) * given.answer_tokens
    options = _options(given, token_bytes, most) | more
    ours = engine_args(budget=given.budget, parameters=VOTES, sessions=Sessions(), **options)
    engines = {"stock": Engine(model, **options), "snapkv": Engine(model, **ours)}
    yield _answered(engines, texts, given)
    for engine in engines.values():
        engine.close()


def _texts(given: Given) -> list[list[int]]:
    """What every turn adds: first the system's message and the task, then a tool's result."""
    ids = given.loaded.tokenizer(load_haystack().text[:200_000])["input_ids"]
    draw, found = random.Random(0), []
    for turn in range(given.turns):
        tokens = given.first_tokens if not turn else given.turn_tokens
        start = draw.randrange(len(ids) - tokens)
        found.append(ids[start : start + tokens])
    return found


def _answered(engines: dict[str, Engine], texts: Sequence[list[int]], given: Given) -> Row:
    histories: dict[str, list[int]] = {name: [] for name in engines}
    first: dict[str, list[tuple[float, float]]] = {name: [] for name in (*engines, "again")}
    for engine in engines.values():  # the first request of all takes longer
        engine.send([texts[0][:40]], 2)
    for turn, text in enumerate(texts):
        for name in list(engines)[:: -1 if turn % 2 else 1]:
            histories[name] += text
            own = OWN if name == "snapkv" else {}
            spent, answer = _turn(engines[name], histories[name], given.answer_tokens, own)
            first[name].append(spent)
            if turn < len(texts) - 1:
                histories[name] += answer
    pool = engines["snapkv"].pool
    for _ in range(given.read_again):
        first["again"].append(_turn(engines["stock"], histories["stock"], 1, AGAIN)[0])
    tokens = len(histories["stock"])
    row: Row = {
        "turns": len(texts),
        "history_tokens": tokens,
        "turn_tokens": given.turn_tokens,
        "answer_tokens": given.answer_tokens,
        "budget": given.budget,
        "block_tokens": BLOCK_TOKENS,
        "blocks_of_all": -(-tokens // BLOCK_TOKENS),
        "blocks_held": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }
    for name, times in first.items():
        row[f"{name}_first_token_ms"] = [round(wall, 1) for wall, _ in times]
        row[f"{name}_first_token_processor_ms"] = [round(cpu, 1) for _, cpu in times]
    return row


def _turn(
    engine: Engine, ids: list[int], tokens: int, own: Row
) -> tuple[tuple[float, float], list[int]]:
    """Wall and processor ms up to the first token of an answer, and all of it."""
    from vllm import SamplingParams

    core = engine.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **own)
    answer: list[int] = []

    def step() -> None:
        for one in core.step():
            answer[:] = one.outputs[0].token_ids

    def begin() -> None:
        core.add_request("turn", {"prompt_token_ids": list(ids)}, sampling)
        while not answer:
            step()

    spent = spent_on(begin)
    while core.has_unfinished_requests():
        step()
    return (spent.wall_ms, spent.cpu_ms), answer


def _of_demo(given: Given) -> Iterator[Row]:
    text = given.loaded.model.config
    token_bytes = 4 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    yield from _measured(given.model, given, token_bytes)


def _of_shape(given: Given) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        own = {"load_format": "dummy", "skip_tokenizer_init": True}
        for row in _measured(folder, given, 4 * 32 * 5 * 64, **own):
            yield row | {"shape": "SmolLM2-360M"}


def _last(row: Row, name: str, clock: str = "") -> float:
    """Median of the last turns, which other work on the machine disturbs one by one."""
    return float(median(row[f"{name}_first_token_{clock}ms"][-LAST:]))


LAST = 5

_COLUMNS = {
    "model": "{part}",
    "history": "{history_tokens:,}",
    "blocks held": lambda row: f"{row['blocks_held']} of {row['blocks_of_all']}",
    "first token ms": lambda row: f"{_last(row, 'snapkv'):,.0f}",
    "stock, prefix cached": lambda row: f"{_last(row, 'stock'):,.0f}",
    "stock, read again": lambda row: f"{_last(row, 'again'):,.0f}",
    "of cached": lambda row: f"{_last(row, 'snapkv') / _last(row, 'stock'):.2f}",
    "of read again": lambda row: f"{_last(row, 'snapkv') / _last(row, 'again'):.3f}",
    "of cached, processor": lambda row: (
        f"{_last(row, 'snapkv', 'processor_') / _last(row, 'stock', 'processor_'):.2f}"
    ),
}

SESSIONS = Experiment(
    name="sessions",
    title="Sessions of 30 turns, in vLLM",
    measure={"demo model": _of_demo, "random weights": _of_shape},
    options={
        "turns": Sized(30, 4),
        "first_tokens": Sized(600, 100),
        "turn_tokens": Sized(120, 60),
        "answer_tokens": Sized(8, 4),
        "budget": Sized(512, 128),
        "read_again": Sized(2, 1),
    },
    fields={"votes": VOTES},
    described=lambda given: _on(given, "bfloat16"),
    tables=[Table(_COLUMNS, "{turns} turns, budget {budget}, medians of the last turns")],
)
