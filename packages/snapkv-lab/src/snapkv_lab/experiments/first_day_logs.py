"""Logs as a newcomer has them: many lines alike, a few that matter; the same ones every time."""

import random
from collections.abc import Mapping, Sequence

_SERVICES = ("gateway", "billing", "search", "mailer", "indexer", "auth")
_EVENTS = (
    "request served",
    "cache refreshed",
    "connection accepted",
    "job finished",
    "queue drained",
    "session renewed",
)
_STEPS = ("fetching", "compiling", "linking", "testing", "packing")
_PARTS = ("core", "parser", "renderer", "network", "storage", "console", "codec", "scheduler")


def server_log() -> str:
    """An hour of a server: what was served, a disk that fills up and a payment that fails."""
    rng = random.Random(7)
    lines = [
        f"INFO {rng.choice(_SERVICES)} {rng.choice(_EVENTS)} in {rng.randrange(2, 900)} ms"
        for _ in range(60)
    ]
    told = {
        22: "ERROR billing payment 48213 failed: card declined by bank Nordholm",
        45: "WARNING search disk /dev/sdb1 is 93 percent full",
    }
    return "\n".join(_stamped(rng, _with(lines, told)))


def build_log() -> str:
    """A build: what was compiled and tested, a test that failed and where the result was put."""
    rng = random.Random(11)
    lines = [
        f"{rng.choice(_STEPS)} {rng.choice(_PARTS)} module {number} done in "
        f"{rng.randrange(10, 99)}.{rng.randrange(10)} s"
        for number in range(1, 56)
    ]
    told = {
        19: "the compiler is clang version 17.0.6",
        38: "FAILED test_reconnect: timeout after 30 seconds",
        50: "the release was uploaded to the server falcon",
    }
    return "\n".join(_stamped(rng, _with(lines, told)))


def _with(lines: Sequence[str], told: Mapping[int, str]) -> list[str]:
    """The lines with others put in where they happened."""
    both = list(lines)
    for place, line in told.items():
        both.insert(place, line)
    return both


def _stamped(rng: random.Random, lines: Sequence[str]) -> list[str]:
    """The lines with a time before each, which goes on by some seconds."""
    second, stamped = 8 * 3600, []
    for line in lines:
        second += rng.randrange(3, 40)
        hour, minute = divmod(second // 60, 60)
        stamped.append(f"2026-03-14 {hour:02}:{minute:02}:{second % 60:02} {line}")
    return stamped
