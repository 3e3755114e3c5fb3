"""Records of the results of cases: written as compressed JSON, read, and compared."""

import hashlib
import json
import lzma
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from tests.golden.cases import Case
from tests.golden.models import MODELS, drawn_ids, golden_model
from tests.golden.play import Stage, stages

Record = dict[str, Any]

_REPORTED = ("policy", "seen_tokens", "kept_tokens", "held_bytes", "host_bytes", "full_bytes")
_OF_LAYERS = ("kind", "seen_tokens", "kept_tokens", "held_bytes", "full_bytes")


def seen_in(case: Case, *, nudged: bool = False) -> Record:
    """Run a case and return its record."""
    return noted(stages(golden_model(case.model, nudged=nudged), case))


def noted(seen: Iterator[Stage]) -> Record:
    """Return a record of the stages and of the error that ended them, if there was one."""
    threads, found = torch.get_num_threads(), []
    record: Record = {"stages": found}
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for stage in seen:
                found.append(_told(stage))
    except Exception as error:
        record["error"] = [type(error).__name__, _plain(str(error))]
    finally:
        torch.set_num_threads(threads)
    return record


def _told(stage: Stage) -> Record:
    report = stage.report
    return {
        "name": stage.name,
        "tokens": stage.tokens,
        "positions": {str(layer): runs(kept) for layer, kept in stage.positions.items()},
        "report": {name: report[name] for name in (*_REPORTED, "index_bytes")},
        "layers": [[row[name] for name in _OF_LAYERS] for row in report["layers"]],
        "logits": [_bits(row) for row in stage.logits],
        "digest": hashlib.sha256(bytes.fromhex(_bits(stage.logits))).hexdigest()[:24],
    }


def runs(kept: Tensor) -> list[list[str]]:
    """Return positions, (B, heads, kept), as text: "-" for each empty slot, then runs."""
    return [[_runs(head) for head in row] for row in kept.tolist()]


def _runs(positions: list[int]) -> str:
    parts: list[list[int]] = []
    for position in positions:
        if parts and position >= 0 and parts[-1][-1] + 1 == position:
            parts[-1] = [parts[-1][0], position]
        else:
            parts.append([position])
    return " ".join("-" if part == [-1] else "-".join(map(str, part)) for part in parts)


def _bits(values: Tensor) -> str:
    return values.contiguous().cpu().numpy().tobytes().hex()


def _plain(text: str) -> str:
    """Return an error text without addresses, folders and module names, which may change.

    Parameters that were added later are removed if they have their defaults.
    """
    for later in ("decay=None, sink_tokens=0, ", ", window_reduce='mean', voters=None"):
        text = text.replace(later, "")
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/[^'\s;,]*", "FOLDER", text)
    text = re.sub(r"0x[0-9a-f]+", "ADDRESS", text)
    return re.sub(r"snapkv(\.\w+)*\.(\w+)", r"\2", text)


def numbers(bits: str) -> Tensor:
    """Return the float32 values that were recorded as hexadecimal bits."""
    return torch.frombuffer(bytearray.fromhex(bits), dtype=torch.float32)


@torch.no_grad()
def arithmetic() -> str:
    """Return a digest of fixed products and model outputs, which shows how this machine rounds."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    digest = hashlib.sha256()
    values = drawn_ids(96, 64, 3).float() / 64 - 0.5
    whole = values @ values.T
    for fixed in (whole, whole.softmax(-1), whole.exp(), whole.sin(), values.T @ values, whole[:1]):
        digest.update(bytes.fromhex(_bits(fixed @ whole if fixed.shape[-1] == 96 else fixed)))
    for name in MODELS:
        model = golden_model(name)
        cache, ids = DynamicCache(config=model.config), drawn_ids(2, 40, 1)
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        for stop in (38, 39, 40):
            start = cache.get_seq_length()
            logits = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop],
                past_key_values=cache,
            ).logits
            digest.update(bytes.fromhex(_bits(logits)))
    torch.set_num_threads(torch_threads)
    return digest.hexdigest()


def made(cases: Iterable[Case]) -> Record:
    """Return the record of some cases, each with the arithmetic that it was made with."""
    rounding = arithmetic()
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cases": {str(case): seen_in(case) | {"arithmetic": rounding} for case in cases},
    }


def write(record: Record, path: Path) -> None:
    """Write a record to a compressed file; equal records give equal bytes."""
    text = json.dumps(record, separators=(",", ":"), sort_keys=True)
    path.write_bytes(lzma.compress(text.encode()))


def read(path: Path) -> Record:
    """Read a record that `write` has written."""
    found: Record = json.loads(lzma.decompress(path.read_bytes()))
    return found


def differences(found: Record, expected: Record) -> list[str]:
    """Return the differences between two records of one case, compared bit for bit."""
    told = []
    if found.get("error") != expected.get("error"):
        told.append(f"error: {found.get('error')}, recorded {expected.get('error')}")
    if len(found["stages"]) != len(expected["stages"]):
        told.append(f"stages: {len(found['stages'])}, recorded {len(expected['stages'])}")
    for own, other in zip(found["stages"], expected["stages"], strict=False):
        told += [f"{other['name']}: {what}" for what in _differences(own, other)]
    return told


def _differences(found: Record, expected: Record) -> list[str]:
    told = [
        f"{part} {found[part]}, recorded {expected[part]}"
        for part in ("name", "tokens", "layers")
        if found[part] != expected[part]
    ]
    for part in ("positions", "report"):
        for name in sorted({*found[part], *expected[part]}):
            own, other = found[part].get(name), expected[part].get(name)
            if own != other:
                told.append(f"{part} {name} {own}, recorded {other}")
    if found["digest"] != expected["digest"]:
        told.append(f"logits, by up to {distance(found, expected):.2g}")
    return told


def distance(found: Record, expected: Record) -> float:
    """Return the largest difference between the recorded logits of two stages."""
    if len(found["logits"]) != len(expected["logits"]):
        return float("inf")
    most = 0.0
    for own, other in zip(found["logits"], expected["logits"], strict=True):
        a, b = numbers(own), numbers(other)
        count = min(len(a), len(b))
        most = max(most, float((a[:count] - b[:count]).abs().max()))
    return most
