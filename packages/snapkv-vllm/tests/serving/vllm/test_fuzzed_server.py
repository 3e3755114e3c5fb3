"""Whatever a request sets, it is answered in ordinary time or refused, and nobody else notices."""

import json
import random
import time
from statistics import median

import pytest

from snapkv.errors import SnapKVError
from snapkv_vllm.settings import ServingSettings
from tests.serving.fuzzing import random_settings
from tests.serving.vllm.servers import Server

BUDGET = 128
PROMPT = 300
NOISE = 0.5  # seconds that a busy machine adds now and then


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with Server(folder, "--budget", str(BUDGET), "--policy", "snapkv") as running:
        yield running


def post(server, prompt, settings, *, stream=False):
    """The status, the answer's text and the seconds it took."""
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "stream": stream}
    begin = time.perf_counter()
    status, said = server.post("/v1/completions", {**body, "vllm_xargs": settings})
    return status, said, time.perf_counter() - begin


def expected_status(settings):
    try:
        ServingSettings(budget=BUDGET).for_request(json.loads(json.dumps(settings)))
    except SnapKVError:
        return 400
    return 200


def ordinary(server, text_ids, draw):
    start = draw.randrange(9_000)
    return post(server, text_ids[start : start + PROMPT], {})[2]


def drawn(draw, cases):
    """Random settings with the status they are to get; half of them are taken by the server."""
    of_status = {200: [], 400: []}
    while min(len(settings) for settings in of_status.values()) < cases // 2:
        settings = random_settings(draw, in_json=True)
        of_status[expected_status(settings)].append(settings)
    both = [(one, status) for status, many in of_status.items() for one in many[: cases // 2]]
    return draw.sample(both, len(both))


@pytest.mark.parametrize("cases", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_settings_are_answered_in_ordinary_time_or_refused(server, text_ids, cases):
    draw = random.Random(cases)
    fixed = text_ids[:PROMPT]
    before = json.loads(post(server, fixed, {})[1])["choices"]
    usual = median(ordinary(server, text_ids, draw) for _ in range(5))
    for settings, expected in drawn(draw, cases):
        stream = draw.random() < 0.5
        for _ in range(3):  # a costly setting costs every time, a busy machine does not
            start = draw.randrange(9_000)
            prompt = text_ids[start : start + PROMPT]
            status, said, seconds = post(server, prompt, settings, stream=stream)
            assert status == expected, (settings, said)
            if seconds < 2 * usual + NOISE:
                break
        else:
            raise AssertionError((settings, f"{seconds} s, {usual} s is usual"))
        assert status == 400 or "error" not in said
    while server.metric("vllm:num_requests_running"):
        time.sleep(0.2)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert json.loads(post(server, fixed, {})[1])["choices"] == before
