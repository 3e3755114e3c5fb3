"""What fails is made short: fewer operations and smaller numbers, while it still fails so."""

import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace

import torch
import transformers

from tests.sequences.drawing import drawn
from tests.sequences.operations import Operation, Sequence
from tests.sequences.playing import ERROR, Verdict, play


def played(numbered: tuple[int, int]) -> tuple[int, Verdict, float]:
    """Of the sequence of that seed and number the verdict, and the seconds of a core it took."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    start = time.process_time()
    verdict = play(drawn(*numbered))
    return numbered[1], verdict, time.process_time() - start


def cause(verdict: Verdict) -> str:
    """What two verdicts of the same kind of failure have in common."""
    said = verdict.said[0] if verdict.said else ""
    said = re.sub(r"keeps .*|are off by .*|: \[.*", "", said)
    return f"{verdict.kind}: {re.sub(r'[0-9]+', 'N', said)}"


def shrunk(sequence: Sequence, plays: int = 300) -> tuple[Sequence, Verdict]:
    """A shorter sequence that fails, and how."""
    verdict = play(sequence)
    goal, best = _goal(verdict), verdict
    progress = True
    while progress and plays > 0:
        progress = False
        for candidate in _shorter(sequence):
            plays -= 1
            found = play(candidate)
            if _goal(found) == goal:
                sequence, best, progress = candidate, found, True
                break
            if plays <= 0:
                break
    return sequence, best


def _goal(verdict: Verdict) -> str:
    return cause(verdict) if verdict.kind == ERROR else verdict.kind


def _shorter(sequence: Sequence) -> Iterator[Sequence]:
    operations = sequence.operations
    for number in reversed(range(len(operations))):
        yield replace(sequence, operations=operations[:number] + operations[number + 1 :])
    for name in sequence.options:
        left = {key: value for key, value in sequence.options.items() if key != name}
        yield replace(sequence, options=left)
    if sequence.model != "llama":
        yield replace(sequence, model="llama")
    for number, operation in enumerate(operations):
        for simpler in _simpler(operation):
            changed = (*operations[:number], simpler, *operations[number + 1 :])
            yield replace(sequence, operations=changed)


def _simpler(operation: Operation) -> Iterator[Operation]:
    for part in fields(operation):
        value = getattr(operation, part.name)
        if value == part.default:
            continue
        if part.name == "how":
            yield replace(operation, how="told", piece=0, cap=0, answer=1)
        elif isinstance(value, bool):
            yield replace(operation, **{part.name: False})
        elif isinstance(value, tuple):
            for place in range(len(value)):
                if len(value) > 1:
                    yield replace(operation, **{part.name: value[:place] + value[place + 1 :]})
                for less in _less(value[place], 0):
                    changed = (*value[:place], less, *value[place + 1 :])
                    yield replace(operation, **{part.name: changed})
        elif isinstance(value, int):
            for less in _less(value, 1):
                yield replace(operation, **{part.name: less})


def _less(value: int, least: int) -> list[int]:
    return sorted({least, value // 2, value - 4, value - 1} & set(range(least, value)))
