"""kvpress in an environment of its own; and its SnapKV's time beside ours, run in turn.

kvpress takes an older transformers than snapkv does, so it cannot be imported here. It runs in a
process of its own environment, which has a model of the same configuration and waits while others
work.
"""

import contextlib
import math
import signal
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv import FullCache, SnapKV
from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.measuring import Peer, Turns
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.prompts import SEED, decoder, read_prompt
from snapkv_lab.experiments.records import ROOT, Row, environment_line
from snapkv_lab.measure.contenders import Pieces, compressed, full
from snapkv_lab.measure.held_bytes import peak_growth_bytes

PYTHON = ROOT / ".venv-kvpress" / "bin" / "python"
_WORKER = Path(__file__).with_name("kvpress_worker.py")


class Kvpress:
    """A cache that kvpress's `SnapKVPress` compresses, or the full cache of its transformers.

    A `Contender` of the benches, whose process starts with the first thing that is asked of it.
    kvpress pools with averages and combines query heads with their mean, whatever the policy says.

    Args:
        label: its name.
        python: the interpreter of an environment with kvpress.
        model: the model whose configuration is measured.
        policy: budget (or ratio), window and kernel; None keeps every token.
        weights: measure the model's own weights; else random ones, which take as long.
        tokenizer: for presses that want one.

    Raises:
        InvalidArgumentError: no such interpreter; later, what kvpress does not take.
        OutOfMemoryError: later, what does not fit, beginning with the weights a second time.

    Attributes:
        policy: None: nothing of ours is at work.
        versions: of kvpress and what it runs on, once it has started.
        last: what it said last.
    """

    policy = None

    def __init__(
        self,
        label: str,
        python: str | Path,
        model: PreTrainedModel,
        policy: SnapKV | None,
        *,
        weights: bool = False,
        tokenizer: Any = None,
    ) -> None:
        if not Path(python).is_file():
            raise InvalidArgumentError(
                "kvpress_python: expected the interpreter of an environment with kvpress, got "
                f"{str(python)!r}; make one: python -m venv there; there/bin/pip install kvpress; "
                "and pass there/bin/python"
            )
        self.label, self._python, self._policy = label, str(python), policy
        self._model, self._weights, self._tokenizer = model, weights, tokenizer
        self._peer: Peer | None = None
        self.versions: Row = {}
        self.last: Row = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._peer is not None:
            self._peer.end()
            self._said.close()
            self._folder.cleanup()
        self._peer = None

    def read(self, ids: Tensor) -> float:
        """Read a prompt, (B, N) int64, into a new cache; ms to the logits behind it."""
        kept = self._kept_tokens(ids.shape[1])
        return float(self.ask(do="read", ids=ids.tolist(), kept_tokens=kept)["ms"])

    def reader(self, model: PreTrainedModel, ids: Tensor, pieces: Pieces) -> "_Holding":
        """Reads a prompt as `read` does: with its own model, all at once."""
        del model, pieces
        return _Holding(self, ids)

    def peak(self, model: PreTrainedModel, ids: Tensor, pieces: Pieces) -> Row:
        """Read a prompt: "peak_growth_bytes" held at once, "held_bytes" after it."""
        del model, pieces
        self.forget()
        process = self._started().process.pid
        peak = peak_growth_bytes(lambda: self.read(ids), self._model.device, process=process)
        read = {"peak_growth_bytes": peak} | self.last  # on CUDA it says its own
        self.forget()
        return {name: read[name] for name in ("peak_growth_bytes", "held_bytes")}

    def behind(self, model: PreTrainedModel, batch: int, length: int) -> "_Holding":
        """A cache as a prompt of that many tokens leaves it, from random states."""
        del model
        self.forget()
        kept = self._kept_tokens(length)
        self.ask(do="fill", batch=batch, length=length, kept_tokens=kept)
        return _Holding(self)

    def __call__(self, tokens: int = 1) -> float:
        """Generate greedily behind the last prompt; ms per token."""
        return float(self.ask(do="decode", tokens=tokens)["ms"]) / tokens

    def forget(self) -> None:
        """Hold no cache, so that others find its memory."""
        if self._peer is not None and not self._peer.waits:
            self.ask(do="forget")
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # and the other way round

    def _kept_tokens(self, length: int) -> int:
        policy = self._policy
        if policy is None:
            return length
        if policy.keep_ratio is None:
            assert policy.budget is not None
            return policy.budget
        return policy.window_size + math.floor(policy.keep_ratio * (length - policy.window_size))

    def _started(self) -> Peer:
        if self._peer is None:
            # What libraries print, and why it ended.
            self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 # closed at the end
            command = [self._python, "-I", str(_WORKER)]  # nothing of this environment on its path
            self._peer = Peer(command, stderr=self._said)
            self._folder = tempfile.TemporaryDirectory()  # some presses look into it later
            try:
                for own in (self._model if self._weights else self._model.config, self._tokenizer):
                    if own is not None:
                        own.save_pretrained(self._folder.name)
                self.versions = self.ask(**_settings(self._model, self._folder.name, self._policy))
            except BaseException:
                self.__exit__()
                raise
        return self._peer

    def ask(self, **question: Any) -> Row:
        """What a method of its worker says: its name under "do", beside its arguments."""
        peer = self._started()
        answer = peer.ask(question)
        if answer is None:  # the next question starts another
            answer = self._last_words(peer.end())
            self.__exit__()
        if "out_of_memory" in answer:
            raise OutOfMemoryError(f"kvpress: {answer['out_of_memory']}")
        if "error" in answer:
            raise InvalidArgumentError(
                f"kvpress: expected it to measure {self.label!r}, got {answer['error']}; leave it "
                "out of the baselines"
            )
        if answer:
            self.last = answer
        return answer

    def _last_words(self, status: int) -> Row:
        """What the end of its process comes to."""
        self._said.seek(0)
        lines = self._said.read().strip().splitlines() or ["nothing"]
        why = f"status {status} from {self._python!r}, which said {lines[-1]}"
        return {"out_of_memory" if status == -signal.SIGKILL else "error": why}


class _Holding:
    """A reader of a prompt or, without one, a decoder.

    What the process holds is forgotten there when this object is forgotten here.
    """

    def __init__(self, theirs: Kvpress, ids: Tensor | None = None) -> None:
        self._theirs, self._ids = theirs, ids
        weakref.finalize(self, theirs.forget).atexit = False

    @property
    def held_bytes(self) -> int:
        return int(self._theirs.last["held_bytes"])

    read_bytes = held_bytes

    def __call__(self, tokens: int = 1) -> float:
        return self._theirs(tokens) if self._ids is None else self._theirs.read(self._ids)


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


_NAMES = {
    "kvpress": "kvpress, SnapKVPress",
    "kvpress full": "full cache, kvpress's transformers",
    "snapkv": "snapkv",
    "transformers": "full cache",
}
_FULL = {"kvpress": "kvpress full", "snapkv": "transformers"}
"""What a method is a part of: the full cache on the same transformers."""


def _at_once(model: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@torch.inference_mode()
def _measure(given: Given) -> Iterator[Row]:
    model, python = given.loaded.model, given.python
    policy = SnapKV(given.budget, window_size=32, kernel_size=7, pooling="avg")  # as kvpress pools
    with (
        Kvpress("kvpress", python, model, policy, weights=True) as theirs,
        Kvpress("kvpress full", python, model, None, weights=True) as theirs_full,
    ):
        for length in given.lengths:
            ids = given.prompt(length)
            prompt = torch.tensor([ids])
            theirs.read(prompt)
            peer = theirs.versions | {"kept_tokens": theirs.last["kept_tokens"]}
            named = {"prompt_tokens": length, "policy": policy.describe(), "peer": peer}
            read = {
                "kvpress": partial(theirs.read, prompt),
                "kvpress full": partial(theirs_full.read, prompt),
                "snapkv": compressed("snapkv", policy).reader(model, prompt, _at_once),
                "transformers": full("transformers").reader(model, prompt, _at_once),
            }
            yield from _rows("prefill", read, given.prefill_rounds, named)
            whole = read_prompt(model, ids)
            steps = {
                "kvpress": theirs,
                "kvpress full": theirs_full,
                "snapkv": decoder(whole, whole.compressed(policy)),
                "transformers": decoder(whole, whole.compressed(FullCache())),
            }
            yield from _rows("decode", steps, given.decode_rounds, named)


def _rows(
    benchmark: str, work: dict[str, Callable[[], Any]], rounds: int, named: Row
) -> Iterator[Row]:
    turns = Turns(work, rounds=rounds)
    for name in turns:
        yield {
            "benchmark": benchmark,
            "cache": name,
            **named,
            "rounds": rounds,
            "ms": turns.ms(name, 2),
            "against_kvpress": turns.ratio(name, "kvpress"),
            "against_full": turns.ratio(name, _FULL.get(name, name)),
        }


def _line(rows: list[Row]) -> str:
    peer = "kvpress {kvpress} on transformers {transformers}".format_map(rows[0]["peer"])
    return f"{environment_line(rows)}; {peer}"


KVPRESS = Experiment(
    name="kvpress",
    title="Beside kvpress",
    takes="about nine minutes",
    measure=_measure,
    options={
        "python": str(PYTHON),
        "budget": Sized(512, 64),
        "lengths": Sized((1024, 4096), (200,)),
        "prefill_rounds": Sized(8, 2),
        "decode_rounds": Sized(48, 3),
    },
    fields={"seed": SEED},
    measured=_line,
    tables=[
        Table(
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
