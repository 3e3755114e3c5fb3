"""kvpress's SnapKV among the contenders, in a process of its own environment.

kvpress takes an older transformers than snapkv does, so it cannot be imported here. Its process has
a model of the same configuration and waits while others work.
"""

import contextlib
import json
import math
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv.lab.measure.held_bytes import peak_growth_bytes
from snapkv.policies import SnapKV

Row = dict[str, Any]

_WORKER = Path(__file__).with_name("kvpress_worker.py")


class Kvpress:
    """A cache that kvpress's `SnapKVPress` compresses, or the full cache of its transformers.

    Its process starts with the first thing that is asked of it. kvpress pools with averages and
    combines query heads with their mean, whatever the policy says.

    Args:
        label: its name.
        python: the interpreter of an environment with kvpress.
        model: the model whose configuration is measured.
        policy: budget (or ratio), window and kernel; None keeps every token.
        weights: measure the model's own weights; else random ones, which take as long.

    Raises:
        InvalidArgumentError: no such interpreter; later, what kvpress does not take.
        OutOfMemoryError: later, what does not fit, beginning with the weights a second time.

    Attributes:
        versions: of kvpress and what it runs on, once it has started.
        generated: token ids of the last call, by row.
    """

    def __init__(
        self,
        label: str,
        python: Path | None,
        model: PreTrainedModel,
        policy: SnapKV | None,
        *,
        weights: bool = False,
    ) -> None:
        if python is None or not python.is_file():
            raise InvalidArgumentError(
                "kvpress_python: expected the interpreter of an environment with kvpress, got "
                f"{python and str(python)!r}; make one: python -m venv there; there/bin/pip "
                "install kvpress; and pass there/bin/python"
            )
        self.label, self._python, self._policy = label, str(python), policy
        self._model, self._weights = model, weights
        self._device = model.device
        self._process: subprocess.Popen[str] | None = None
        self._waits = False
        self.versions: Row = {}
        self._last: Row = {}
        self.generated: list[list[int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def read(self, ids: Tensor) -> float:
        """Read a prompt, (B, N) int64, into a new cache; ms to the logits behind it."""
        return float(self._read(ids)["ms"])

    def peak(self, ids: Tensor) -> Row:
        """Read a prompt: "peak_growth_bytes" held at once, "held_bytes" after it."""
        self.forget()
        process, read = self._started(), []
        peak = peak_growth_bytes(
            lambda: read.append(self._read(ids)), self._device, process=process.pid
        )
        return {
            "peak_growth_bytes": read[0].get("peak_growth_bytes", peak),  # on CUDA its own
            "held_bytes": read[0]["held_bytes"],
        }

    def filled(self, batch: int, length: int) -> "Kvpress":
        """Itself, with a cache as a prompt of that many tokens leaves it, from random states."""
        self.forget()
        kept = self._kept_tokens(length)
        self._last = self._ask(do="fill", batch=batch, length=length, kept_tokens=kept)
        return self

    def __call__(self, tokens: int) -> float:
        """Generate greedily behind the last prompt; ms per token."""
        self._last = self._ask(do="decode", tokens=tokens)
        self.generated = self._last["tokens"]
        return float(self._last["ms"]) / tokens

    def forget(self) -> None:
        """Hold no cache, so that others find its memory."""
        if self._process is not None:
            self._ask(do="forget")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # and the other way round

    @property
    def held_bytes(self) -> int:
        """Bytes that the last cache holds."""
        return int(self._last["held_bytes"])

    read_bytes = held_bytes

    @property
    def kept_tokens(self) -> int:
        """Tokens that a layer of the last cache stores."""
        return int(self._last["kept_tokens"])

    def _read(self, ids: Tensor) -> Row:
        kept = self._kept_tokens(ids.shape[1])
        self._last = self._ask(do="read", ids=ids.tolist(), kept_tokens=kept)
        return self._last

    def _kept_tokens(self, length: int) -> int:
        if self._policy is None:
            return length
        if self._policy.keep_ratio is None:
            assert self._policy.budget is not None
            return self._policy.budget
        window = self._policy.window_size
        return window + math.floor(self._policy.keep_ratio * (length - window))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = self._start()
            try:
                with tempfile.TemporaryDirectory() as folder:
                    (self._model if self._weights else self._model.config).save_pretrained(folder)
                    self.versions = self._ask(**_settings(self._model, folder, self._policy))
            except BaseException:
                self._end()
                raise
        return self._process

    def _start(self) -> subprocess.Popen[str]:
        # What libraries print, and why it ended.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 # closed by _end
        try:
            return subprocess.Popen(
                [self._python, "-I", str(_WORKER)],  # nothing of this environment on its path
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
            )
        except OSError as error:
            self._said.close()
            raise InvalidArgumentError(
                f"kvpress_python: expected an interpreter, got {error}; pass another"
            ) from error

    def _ask(self, **question: Any) -> Row:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        self._waits = True
        with contextlib.suppress(BrokenPipeError):  # no answer will come either
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        self._waits = False
        answer: Row = json.loads(line) if line else self._last_words(process.wait())
        if not line:
            self._end()  # the next question starts another
        if "out_of_memory" in answer:
            raise OutOfMemoryError(f"kvpress: {answer['out_of_memory']}")
        if "error" in answer:
            raise InvalidArgumentError(
                f"kvpress: expected it to measure {self.label!r}, got {answer['error']}; leave it "
                "out of the baselines"
            )
        return answer

    def _last_words(self, status: int) -> Row:
        """What the end of its process comes to."""
        self._said.seek(0)
        lines = self._said.read().strip().splitlines() or ["nothing"]
        why = f"status {status} from {self._python!r}, which said {lines[-1]}"
        return {"out_of_memory" if status == -signal.SIGKILL else "error": why}

    def _end(self) -> None:
        if self._process is None:
            return
        if self._waits:  # for an answer that nobody wants any more
            self._process.terminate()
        self._process.communicate()
        self._process = None
        self._said.close()


def forget(contenders: Iterable[Any]) -> None:
    """Let those in other processes hold no cache."""
    for each in contenders:
        if isinstance(each, Kvpress):
            each.forget()


def _settings(model: PreTrainedModel, folder: str, policy: SnapKV | None) -> Row:
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
