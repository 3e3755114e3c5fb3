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
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv.policies import SnapKV
from snapkv_lab.measure.contenders import Pieces
from snapkv_lab.measure.held_bytes import peak_growth_bytes

Row = dict[str, Any]

_WORKER = Path(__file__).with_name("kvpress_worker.py")


class Kvpress:
    """A cache that kvpress's `SnapKVPress` compresses, or the full cache of its transformers.

    A `Contender` of the benches, which works in a process of its own; that starts with the first
    thing that is asked of it. kvpress pools with averages and
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
        policy: None: nothing of ours is at work.
        versions: of kvpress and what it runs on, once it has started.
        generated: token ids of the last call, by row.
    """

    policy = None

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
        kept = self._kept_tokens(ids.shape[1])
        self._last = self._ask(do="read", ids=ids.tolist(), kept_tokens=kept)
        return float(self._last["ms"])

    def reader(self, model: PreTrainedModel, ids: Tensor, pieces: Pieces) -> "_Reader":
        """Reads a prompt as `read` does: with its own model, all at once."""
        del model, pieces
        return _Reader(self, ids)

    def peak(self, model: PreTrainedModel, ids: Tensor, pieces: Pieces) -> Row:
        """Read a prompt: "peak_growth_bytes" held at once, "held_bytes" after it."""
        del model, pieces
        self.forget()
        process = self._started()
        peak = peak_growth_bytes(lambda: self.read(ids), self._device, process=process.pid)
        read = {"peak_growth_bytes": peak} | self._last  # on CUDA it says its own
        self.forget()
        return {name: read[name] for name in ("peak_growth_bytes", "held_bytes")}

    def behind(self, model: PreTrainedModel, batch: int, length: int) -> "_Decoder":
        """A cache as a prompt of that many tokens leaves it, from random states."""
        del model
        self.fill(batch, length)
        return _Decoder(self)

    def fill(self, batch: int, length: int) -> None:
        """Hold a cache as a prompt of that many tokens leaves it, from random states."""
        self.forget()
        kept = self._kept_tokens(length)
        self._last = self._ask(do="fill", batch=batch, length=length, kept_tokens=kept)

    def __call__(self, tokens: int) -> float:
        """Generate greedily behind the last prompt; ms per token."""
        self._last = self._ask(do="decode", tokens=tokens)
        self.generated = self._last["tokens"]
        return float(self._last["ms"]) / tokens

    def forget(self) -> None:
        """Hold no cache, so that others find its memory."""
        if self._process is not None and not self._waits:
            self._ask(do="forget")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # and the other way round

    @property
    def held_bytes(self) -> int:
        """Bytes that the last cache holds."""
        return int(self._last["held_bytes"])

    @property
    def kept_tokens(self) -> int:
        """Tokens that a layer of the last cache stores."""
        return int(self._last["kept_tokens"])

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


class _Holding:
    """What the process holds is forgotten there when this object is forgotten here."""

    def __init__(self, theirs: Kvpress) -> None:
        self._theirs = theirs
        weakref.finalize(self, theirs.forget).atexit = False


class _Reader(_Holding):
    def __init__(self, theirs: Kvpress, ids: Tensor) -> None:
        super().__init__(theirs)
        self._ids = ids

    def __call__(self) -> float:
        return self._theirs.read(self._ids)


class _Decoder(_Holding):
    @property
    def held_bytes(self) -> int:
        return self._theirs.held_bytes

    read_bytes = held_bytes

    def __call__(self, tokens: int) -> float:
        return self._theirs(tokens)


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
