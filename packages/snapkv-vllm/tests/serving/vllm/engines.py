"""An engine in this process, with its inside open to the tests."""

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from snapkv.ops import kept_indices

OWN = ("budget", "policy", "parameters", "limits", "max_window_size", "sessions")
"""Options of `engine_args` that are not vLLM's."""


def greedy(tokens, **options):
    """Sampling parameters of exactly that many likeliest tokens."""
    from vllm import SamplingParams

    common = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**common | options, max_tokens=tokens)


@dataclass
class Watched:
    """What was kept while watching: per compression, by how many tokens had been seen."""

    kv_heads: int
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    blocks_held: list[list[int]] = field(default_factory=list)

    @property
    def prompts(self) -> int:
        return len(self.kept)

    def of(self, prompt) -> list[list[list[int]]]:
        """The positions that each head keeps of a prompt, layer by layer."""
        kept = [keep.expand(-1, self.kv_heads, -1) for keep in self.kept[len(prompt)]]
        return [positions_of(keep, len(prompt)) for keep in kept]


def positions_of(kept: Tensor, tokens: int) -> list[list[int]]:
    """Of (1, H, K) positions and -1, those of every head that lie in the first tokens."""
    return [[p for p in head if 0 <= p < tokens] for head in kept[0].tolist()]


def require_same_as_library(
    engine: "Engine", small: Any, prompts: Any, policy: Any, tokens: int
) -> Watched:
    """Check that prompts that come together are kept and answered as by the library.

    Returns:
        What was kept. Every prompt has another length.
    """
    with engine.watching() as kept:
        answers = engine.answers(prompts, greedy(tokens))
    compressed = [ids for ids in prompts if len(ids) > engine.budget]
    for prompt, answer in zip(prompts, answers, strict=True):
        expected, cache = small.library(prompt, policy, tokens)
        assert answer == expected, len(prompt)
        if prompt in compressed:
            layers = [cache.kept_positions(layer) for layer in small.compressed_layers]
            library = [
                positions_of(one.expand(-1, kept.kv_heads, -1), len(prompt)) for one in layers
            ]
            assert kept.of(prompt) == library, len(prompt)
    assert sorted(kept.kept) == sorted(map(len, compressed))
    engine.require_empty()
    return kept


def small_engine(small: Any, **options: Any) -> "Engine":
    """An engine of one of the small random models, where 512 tokens are many.

    With the method of the paper, unless the options say another one.
    """
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 50 << 20}
    usual = {"skip_tokenizer_init": True, "policy": "snapkv", **sizes}
    return Engine(small.folder, **{**usual, **options})


class Engine:
    """vLLM's `LLM` of a model, in float32, with or without compression."""

    def __init__(self, folder: str, *, compressed: bool = True, **options: Any) -> None:
        from vllm import LLM

        from snapkv_vllm import engine_args

        own = {name: options.pop(name) for name in OWN if name in options}
        self.budget = own.get("budget", 0)
        common: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 4096,
            "block_size": 32,
            "kv_cache_memory_bytes": 300 << 20,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "seed": 0,
            "disable_log_stats": True,
        }
        arguments = common | options
        self.llm = LLM(folder, **(engine_args(**own, **arguments) if compressed else arguments))
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.all_blocks = self.free_blocks
        self._started = self.preempted = 0
        preempt = self.scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> None:
            self.preempted += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = count

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        """Give its memory back; vLLM's own groups of processes stay for the next, which is fast."""
        gc.unfreeze()
        self.core.structured_output_manager.clear_backend()
        self.core.model_executor.shutdown()
        del self.llm, self.core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def kv_heads(self) -> int:
        config = self.llm.llm_engine.vllm_config
        return config.model_config.get_num_kv_heads(config.parallel_config)

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def waits(self) -> int:
        """How often requests have waited for want of room for what is kept."""
        return int(self.scheduler._metrics.get("waits")._value.get())

    @property
    def block_tokens(self) -> int:
        return self.scheduler.block_size

    def outputs(self, prompts: list[list[int]], sampling: Any) -> list[Any]:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return self.llm.generate(inputs, sampling, use_tqdm=False)

    def answers(self, prompts: list[list[int]], sampling: Any) -> list[list[int]]:
        return [list(one.outputs[0].token_ids) for one in self.outputs(prompts, sampling)]

    def start(self, prompts: list[list[int]], sampling: Any) -> list[str]:
        names = []
        for ids in prompts:
            self._started += 1
            names.append(f"started-{self._started}")
            self.llm.llm_engine.add_request(names[-1], {"prompt_token_ids": ids}, sampling)
        return names

    def step(self) -> list[Any]:
        return self.llm.llm_engine.step()

    def blocks_in_turn(self, prompt: list[int], sampling: Any) -> list[int]:
        """How many blocks a request holds from step to step, each number as long as it stays."""
        self.start([prompt], sampling)
        held = []
        while self.scheduler.requests:
            self.step()
            held.append(self.all_blocks - self.free_blocks)
        return [blocks for blocks, _ in itertools.groupby(held)]

    def abort_all(self) -> None:
        self.llm.llm_engine.abort_request(list(self.scheduler.requests), internal=True)

    def abort(self, request: str) -> None:
        """Abort one that was started, under the name that `start` gave it."""
        before = len(self.scheduler.requests)
        self.llm.llm_engine.abort_request([request])
        assert len(self.scheduler.requests) < before, request

    def leftovers(self) -> list[str]:
        """Requests that scheduler or worker still hold something for."""
        runner = self.runner
        self.step()  # workers hear of finished requests with the next step
        managers = self.scheduler._blocks._managers.values()
        held = [
            self.scheduler._plans,
            self.scheduler._metrics._counted,
            self.scheduler._waiting_for_reservation,
            *(held for one in managers for held in (one.dropped_tokens, one.reservations)),
            runner._heads._kept,
            runner._dropped,
            runner._compressed,
            runner._recorder.recorded,
        ]
        return [request for one in held for request in one]

    def require_empty(self) -> None:
        """All blocks have come back, and nothing is remembered of any request."""
        assert self.free_blocks == self.all_blocks
        assert not self.leftovers()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watched]:
        """Note what every prompt keeps, and how many blocks it holds right afterwards."""
        seen, compressor = Watched(self.kv_heads), self.runner._compressor
        keep, compress = compressor._select_tokens, self.scheduler._blocks.compress
        across = compressor._select_across

        def keep_and_note(run, request, order, keys):
            indices = keep(run, request, order, keys)
            seen.kept.setdefault(order.seen_tokens, []).extend(indices.split(1))
            return indices

        def keep_across_and_note(runs, request, order, sources):
            masks = across(runs, request, order, sources)
            layers = [layer for mask in masks for layer in mask.split(1)]
            seen.kept.setdefault(order.seen_tokens, []).extend(map(kept_indices, layers))
            return masks

        def compress_and_note(request_id, order):
            moves = compress(request_id, order)
            seen.blocks_held.append([len(move.targets) for move in moves])
            return moves

        compressor._select_tokens = keep_and_note
        compressor._select_across = keep_across_and_note
        self.scheduler._blocks.compress = compress_and_note
        try:
            yield seen
        finally:
            del compressor._select_tokens, compressor._select_across
            del self.scheduler._blocks.compress
