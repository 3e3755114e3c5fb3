"""kvpress in an environment of its own, and the time of its SnapKV beside ours.

kvpress needs an older transformers than snapkv, so it cannot be imported here. It runs in a process
of its own environment, which loads a model of the same configuration and waits while others work.
"""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv import FullCache, SnapKV
from snapkv.errors import wrong
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.measuring import InterleavedTimings
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.prompts import SEED, greedy_decoder, read_prompt
from snapkv_lab.experiments.records import ROOT, environment_line
from snapkv_lab.measure.contenders import compressed_contender, transformers_contender
from snapkv_lab.rows import Row

PYTHON = ROOT / ".venv-kvpress" / "bin" / "python"
_WORKER = Path(__file__).with_name("kvpress_worker.py")


class Kvpress:
    """A process with the same model, and a cache that kvpress compresses, or a full cache.

    The process starts with the first request to it, and ends with the `with` block in which the
    caller must use the object. `versions` are known from then on, and `last` is its last answer.
    kvpress pools with averages and combines query heads by their mean, whatever
    the policy says.

    Args:
        python: the interpreter of an environment with kvpress.
        model: the model that the process loads too.
        policy: budget, window and kernel of `SnapKVPress`; None keeps every token.
        tokenizer: for presses that need one.

    Raises:
        InvalidArgumentError: there is no such interpreter.
    """

    def __init__(
        self,
        python: str | Path,
        model: PreTrainedModel,
        policy: SnapKV | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Check that the Python interpreter exists.

        Raises:
            InvalidArgumentError: there is no such file.
        """
        if not Path(python).is_file():
            raise wrong(
                "python",
                f"expected the interpreter of an environment with kvpress, but got {str(python)!r}",
                "Make one with python -m venv there; there/bin/pip install kvpress; and pass "
                "there/bin/python",
            )
        self._python, self._policy = str(python), policy
        self._model, self._tokenizer = model, tokenizer
        self._process: Any = None
        self.versions: Row = {}
        self.last: Row = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()  # it may still work, although nobody waits for it
            self._process.communicate()
            self._output.close()
            self._folder.cleanup()
        self._process = None

    def read(self, ids: Tensor) -> float:
        """Read a prompt into a new cache and return the time in milliseconds.

        Args:
            ids: the prompt, (B, N) int64.

        Raises:
            InvalidArgumentError: kvpress failed, or the process ended.
        """
        kept = ids.shape[1] if self._policy is None else self._policy.budget
        return float(self.ask(do="read", ids=ids.tolist(), kept_tokens=kept)["ms"])

    def __call__(self, tokens: int = 1) -> float:
        """Generate tokens after the last prompt and return the time per token in milliseconds.

        Raises:
            InvalidArgumentError: kvpress failed, for example without a prompt, or the process
                ended.
        """
        return float(self.ask(do="decode", tokens=tokens)["ms"]) / tokens

    def ask(self, **question: Any) -> Row:
        """Send a request to the worker process and return its answer, which also becomes `last`.

        "do" names a method of the worker, and the other fields are its arguments. The process is
        started first if it does not run.

        Raises:
            InvalidArgumentError: the method failed, or the process ended.
        """
        process = self._start_process()
        with contextlib.suppress(BrokenPipeError):  # no answer will come either
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        answer: Row = json.loads(line) if line else {"error": self._describe_end()}
        if "error" in answer:
            raise wrong("kvpress", f"the run has failed: {answer['error']}", "Remove this method")
        self.last = answer
        return answer

    def _start_process(self) -> Any:
        """Return the process of the worker, and start it first if it does not run.

        Starting writes the model into a temporary folder, from which the worker loads it.

        Raises:
            InvalidArgumentError: the worker cannot load the model.
        """
        if self._process is None:
            # Holds what libraries print, and the reason if the process ends.
            self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 # closed at the end
            command = [self._python, "-I", str(_WORKER)]  # without this environment on its path
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen(command, stderr=self._output, **pipes)
            self._folder = tempfile.TemporaryDirectory()  # some presses read it later
            for own in (self._model, self._tokenizer):
                if own is not None:
                    own.save_pretrained(self._folder.name)
            self.versions = self.ask(**_settings(self._model, self._folder.name, self._policy))
        return self._process

    def _describe_end(self) -> str:
        """Wait until the process has ended, and return a text with its status, its interpreter, and
        its last line of output.
        """
        status = self._process.wait()
        self._output.seek(0)
        lines = self._output.read().strip().splitlines() or ["nothing"]
        return f"status {status} from {self._python!r}, whose last output was {lines[-1]}"


def _settings(model: PreTrainedModel, folder: str, policy: SnapKV | None) -> Row:
    """Return the arguments with which the worker process builds its `Worker`, as a dictionary for
    JSON with the keys "model", "dtype", "device", "attn_implementation", "threads" and "press".

    Args:
        model: the model, whose dtype, device and attention the worker uses too.
        folder: the folder into which the model was written.
        policy: its window and kernel become those of the press; None for a full cache.
    """
    press = None
    if policy is not None:
        press = {"window_size": policy.window_size, "kernel_size": policy.kernel_size}
    text = model.config.get_text_config(decoder=True)
    return {
        "model": folder,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attn_implementation": text._attn_implementation.rpartition("|")[2],
        "threads": torch.get_num_threads(),
        "press": press,
    }


_NAMES = {
    "kvpress": "kvpress, SnapKVPress",
    "kvpress full": "full cache, kvpress's transformers",
    "snapkv": "snapkv",
    "transformers": "full cache",
}
_FULL = {"kvpress": "kvpress full", "snapkv": "transformers"}
"""The full cache on the same transformers, for each method."""


@torch.inference_mode()
def _measure(context: RunContext) -> Iterator[Row]:
    """Yield rows about reading and decoding with kvpress, snapkv, and the full cache of each.

    Raises:
        InvalidArgumentError: the environment with kvpress is missing, or kvpress failed.
    """
    model, python = context.loaded.model, context.python
    policy = SnapKV(context.budget, window_size=32, kernel_size=7, pooling="avg")  # like kvpress
    with (
        Kvpress(python, model, policy) as theirs,
        Kvpress(python, model) as theirs_full,
    ):
        for length in context.lengths:
            ids = context.prompt(length)
            prompt = torch.tensor([ids])
            theirs.read(prompt)
            peer = theirs.versions | {"kept_tokens": theirs.last["kept_tokens"]}
            fields = {"prompt_tokens": length, "policy": policy.describe(), "peer": peer}
            read = {
                "kvpress": partial(theirs.read, prompt),
                "kvpress full": partial(theirs_full.read, prompt),
                "snapkv": compressed_contender("snapkv", policy).reader(model, prompt),
                "transformers": transformers_contender("transformers").reader(model, prompt),
            }
            yield from _rows("prefill", read, context.prefill_rounds, fields)
            recorded = read_prompt(model, ids)
            steps = {
                "kvpress": theirs,
                "kvpress full": theirs_full,
                "snapkv": greedy_decoder(recorded, recorded.compressed(policy)),
                "transformers": greedy_decoder(recorded, recorded.compressed(FullCache())),
            }
            yield from _rows("decode", steps, context.decode_rounds, fields)


def _rows(
    benchmark: str, work: dict[str, Callable[[], Any]], rounds: int, fields: Row
) -> Iterator[Row]:
    """Let all contenders take turns, and yield a row with the times and ratios of each.

    Args:
        benchmark: the name of the benchmark in the rows.
        work: the work of each contender, by name. "kvpress" and all values of `_FULL` must be among
            them, because the ratios are relative to them.
        rounds: how many rounds are measured.
        fields: further fields of every row.
    """
    turns = InterleavedTimings(work, rounds=rounds)
    for name in turns:
        yield {
            "benchmark": benchmark,
            "cache": name,
            **fields,
            "rounds": rounds,
            "ms": turns.ms(name, 2),
            "against_kvpress": turns.ratio(name, "kvpress"),
            "against_full": turns.ratio(name, _FULL.get(name, name)),
        }


def _describe_origin(rows: list[Row]) -> str:
    peer = "kvpress {kvpress} on transformers {transformers}".format_map(rows[0]["peer"])
    return f"{environment_line(rows)}; {peer}"


KVPRESS = Experiment(
    name="kvpress",
    title="Against kvpress",
    duration="about nine minutes",
    measure=_measure,
    options={
        "python": str(PYTHON),
        "budget": Size(512, 64),
        "lengths": Size((1024, 4096), (200,)),
        "prefill_rounds": Size(8, 2),
        "decode_rounds": Size(48, 3),
    },
    fields={"seed": SEED},
    origin=_describe_origin,
    tables=[
        Listing(
            {
                "work": "{benchmark}",
                "cache": lambda row: _NAMES[row["cache"]],
                "prompt tokens": "{prompt_tokens:,}",
                "ms": "{ms[p50]:,.1f}",
                "against kvpress": "{against_kvpress[p50]:.3f}",
                "against its full cache": "{against_full[p50]:.3f}",
            }
        )
    ],
)
