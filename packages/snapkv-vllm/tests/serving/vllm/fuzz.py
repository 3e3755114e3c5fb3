"""Requests as careless and as malicious clients send them, to a server that answers others.

    make fuzz REQUESTS=10000

None may get a status of 500 or more. Between them one request comes again and again: its answer
must stay the same, and may not take longer than `STALL` seconds more than it took alone. At the end
nothing may be under way.
"""

import json
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.serving.fuzzing import any_value, random_settings
from tests.serving.vllm import conftest  # noqa: F401  sets the environment before vLLM is there
from tests.serving.vllm.models import ids_of, with_tokenizer
from tests.serving.vllm.servers import Server

STALL = 2.0
CLIENTS = 4
EVERY = 20  # requests between two of the neighbour's
OPTIONS = ("--policy", "snapkv", "--budget", "128", "--sessions")
NEIGHBOUR = {"prompt": ids_of(200), "max_tokens": 8, "temperature": 0}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")


def random_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Where it goes, and its body, in which some fields are right and some are anything."""
    path = draw.choice(PATHS)
    body: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 4])}
    if path == PATHS[0]:
        body["prompt"] = draw.choice(["One two three" * 40, ids_of(draw.randrange(1, 300))])
    else:
        body["messages"] = [random_message(draw) for _ in range(draw.randrange(1, 6))]
    own = {
        "vllm_xargs": lambda: random_settings(draw, in_json=True),
        "snapkv_spans": lambda: [random_span(draw) for _ in range(draw.randrange(4))],
        "agent_hint": lambda: {"session_id": draw.choice(["a", "b", "", "x" * 300])},
        "stream": lambda: draw.random() < 0.5,
        "temperature": lambda: draw.choice([0, 1]),
    }
    for name, make in own.items():
        if draw.random() < 0.25:
            body[name] = make()
    if draw.random() < 0.15:
        body[draw.choice([*body, *own])] = any_value(draw, in_json=True)
    return path, body


def random_message(draw: random.Random) -> dict[str, Any]:
    role = draw.choice(["system", "user", "assistant", "tool", "pope"])
    text = draw.choice(["", "yes", "user", "<think>\nno</think>well", "a\n" * 40, "🙂 é"])
    content = draw.choice([text, text, text, [{"type": "text", "text": text}]])
    message = {"role": role, "content": content}
    return message | ({"tool_call_id": draw.choice("abc")} if role == "tool" else {})


def random_span(draw: random.Random) -> Any:
    start = draw.choice([-1, 300, *[draw.randrange(60)] * 20])
    span: dict[str, Any] = {"start": start, "end": start + draw.choice([0, *range(1, 30)])}
    span["do"] = draw.choice(["drop"] * 6 + ["protect", "protect", "compress", "erase"])
    if span["do"] == "compress" or draw.random() < 0.05:
        span["budget"] = draw.choice([0, 1, 20, 10**9, "1"])
    if draw.random() < 0.1:
        span[draw.choice([*span, "x"])] = any_value(draw, in_json=True)
    return span


@dataclass
class Found:
    """What came of the requests so far."""

    statuses: dict[int, int] = field(default_factory=dict)
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def send(server: Server, draw: random.Random, found: Found) -> None:
    path, body = random_request(draw)
    status, said = server.post(path, body)
    with found.lock:
        found.statuses[status] = found.statuses.get(status, 0) + 1
        if status >= 500 or (status == 400 and "Traceback" in said):
            found.wrong.append(f"{status} {path} {json.dumps(body)[:2000]}: {said[:500]}")


def ask(server: Server) -> tuple[str, float]:
    """What the neighbour is answered, and the seconds that it took."""
    begin = time.perf_counter()
    status, said = server.post(PATHS[0], NEIGHBOUR)
    seconds = time.perf_counter() - begin
    return (json.loads(said)["choices"][0]["text"] if status == 200 else said), seconds


def fuzz(server: Server, requests: int, seed: int = 0) -> Found:
    found, draw = Found(), random.Random(seed)
    expected, _ = ask(server)
    alone = min(ask(server)[1] for _ in range(3))
    with ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(0, requests, EVERY):
            seeds = [draw.random() for _ in range(EVERY)]
            sent = [pool.submit(send, server, random.Random(one), found) for one in seeds]
            answer, seconds = ask(server)
            found.slowest = max(found.slowest, seconds - alone)
            if answer != expected:
                found.wrong.append(f"the neighbour was answered {answer!r}, not {expected!r}")
            for one in sent:
                one.result()
            if found.wrong or found.slowest > STALL:
                break
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.5)
    if server.metric("vllm:num_requests_running"):
        found.wrong.append("requests are still under way")
    return found


def main(requests: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(Path(folder), max_position_embeddings=4096)
        with Server(folder, *OPTIONS, model=model.folder) as server:
            found = fuzz(server, requests)
    print(f"{sum(found.statuses.values())} requests, by status: {found.statuses}")
    print(f"the neighbour waited at most {found.slowest:.2f} s more than alone")
    if found.slowest > STALL:
        found.wrong.append(f"expected at most {STALL} s")
    if found.wrong:
        raise SystemExit("\n".join(found.wrong))


if __name__ == "__main__":
    main(int(sys.argv[1]))
