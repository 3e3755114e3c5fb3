"""Two engines behind one address: answers, refusals, and the death of one of them under load."""

import threading
import time
from collections import Counter

import psutil
import pytest

from snapkv import SnapKV
from snapkv.errors import InvalidArgumentError
from snapkv_vllm.ray import application
from tests.serving.vllm.models import ids_of

LENGTHS = (70, 200, 350)


@pytest.fixture(scope="module")
def expected(model):
    return {length: model.answer(ids_of(length), SnapKV(64), 16) for length in LENGTHS}


@pytest.fixture(scope="module")
def client(ray_address):
    import openai

    return openai.OpenAI(base_url=f"{ray_address}/v1", api_key="none", timeout=120, max_retries=9)


def ask(client, length, **settings):
    answer = client.completions.create(
        model="demo",
        prompt=ids_of(length),
        max_tokens=16,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True, "vllm_xargs": settings or None},
    )
    return answer.choices[0].token_ids


def processes(name):
    """Those below this process, as Ray is, by what they call themselves."""
    return [one for one in psutil.Process().children(recursive=True) if _called(one, name)]


def _called(process, name):
    try:
        return name in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


REPLICA, ENGINE = "ServeReplica:default:snapkv", "VLLM::EngineCore"


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.2)


def running():
    from ray import serve

    deployment = serve.status().applications["default"].deployments["snapkv"]
    return deployment.replica_states.get("RUNNING", 0)


def test_replicas_give_the_same_answers_as_the_library(client, expected):
    for _ in range(3):
        assert {length: ask(client, length) for length in LENGTHS} == expected
    assert len(processes(REPLICA)) == len(processes(ENGINE)) == 2


def test_requests_of_a_session_reach_the_replica_with_its_history(client):
    """Ray's router uses the header; the replica reuses the whole previous prompt."""
    prompts = {f"run{number}": ids_of(100, seed=10 + number) for number in range(6)}
    before = dict.fromkeys(prompts, 0)
    for turn in range(3):
        for session, ids in prompts.items():
            answer = client.completions.create(
                model="demo",
                prompt=ids,
                max_tokens=16,
                extra_headers={"x-session-id": session},
                extra_body={"return_token_ids": True, "agent_hint": {"session_id": session}},
            )
            reused = answer.usage.prompt_tokens_details.cached_tokens or 0
            assert before[session] <= reused <= 2 * before[session], (session, turn)
            before[session] = len(ids)
            ids += [*answer.choices[0].token_ids, *ids_of(50, seed=20 + turn)]


def test_wrong_setting_is_answered_with_status_400(client):
    import openai

    with pytest.raises(openai.BadRequestError, match="snapkv_budget: expected an integer"):
        ask(client, 70, snapkv_budget="many")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"max_modellen": 512}, "max_modellen: vllm serve does not have an option"),
        ({"budget": -1}, "budget"),
        ({"worker_cls": "other.Worker"}, "worker_cls: this option is set by"),
    ],
    ids=str,
)
def test_wrong_option_is_refused_before_replicas_start(option, words):
    with pytest.raises(InvalidArgumentError, match=words):
        application("a-model", **option)


@pytest.mark.parametrize("name", [REPLICA, ENGINE], ids=["replica", "engine"])
def test_requests_are_served_after_a_replica_was_killed(client, expected, name):
    import openai

    wait_for(lambda: running() == 2)
    before = {kind: {one.pid for one in processes(kind)} for kind in (REPLICA, ENGINE)}
    found, stop = Counter(), threading.Event()

    def keep_asking(length):
        while not stop.is_set():
            try:
                found["right" if ask(client, length) == expected[length] else "wrong"] += 1
            except openai.OpenAIError as error:
                found[repr(error)] += 1

    threads = [threading.Thread(target=keep_asking, args=(length,)) for length in LENGTHS * 2]
    for thread in threads:
        thread.start()
    wait_for(lambda: found["right"] >= 12)
    victim = processes(name)[0]
    victim.kill()
    answered = found["right"]
    wait_for(lambda: running() < 2)
    wait_for(lambda: running() == 2)
    meanwhile = found["right"] - answered
    stop.set()
    for thread in threads:
        thread.join()

    assert set(found) == {"right"}
    assert meanwhile > 0
    for kind, old in before.items():  # both went, both came back: no engine without a replica
        wait_for(lambda kind=kind: len(processes(kind)) == 2)
        assert len(old & {one.pid for one in processes(kind)}) == 1
    assert {length: ask(client, length) for length in LENGTHS} == expected
