"""The catalogue and the engine in step, whatever clients do meanwhile."""

import asyncio
import logging
from contextlib import suppress

import pytest

from snapkv.errors import OutOfMemoryError, PromptTooLongError, SnapKVError
from snapkv_vllm.names import RefusedError, status_of
from snapkv_vllm.tenants import tenant_of
from tests.serving.documents.fakes import World

BODY = {"name": "contract", "prompt": "abc"}
MESSAGES = [{"role": "system", "content": "abc"}]


async def test_a_document_is_read_kept_and_deleted():
    world = World()
    found = await world.documents.register("a", BODY)
    told = found.kind, len(found.prefix.token_ids), found.prefix.kept_tokens, found.bytes
    assert told == ("prompt", 4, 4, 40)
    assert found.document_id in world.engine.held
    assert found.document_id != found.name
    chat = {"name": "rules", "messages": MESSAGES, "budget": 5}
    found = await world.documents.register("a", chat)
    assert (found.kind, found.prefix.kept_tokens, found.messages) == ("messages", 5, MESSAGES)
    world.require_in_step()
    assert found.last_used == found.created
    async with world.documents.named("a", "rules") as used:
        assert (used.requests, used.last_used > used.created) == (1, True)
    await world.documents.delete("a", "contract")
    assert world.names("a") == ["rules"]
    world.require_in_step()
    assert world.reasons == ["deleted"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "abc"}, "name: expected a document's name, got something of type NoneType"),
        ({**BODY, "name": ""}, "name: expected 1 to 100 printable characters"),
        ({**BODY, "name": "a" * 101}, "name: expected 1 to 100 printable characters"),
        ({**BODY, "name": "a/b"}, "none of them a slash"),
        ({**BODY, "model": "law"}, "model: expected the model that reads documents, got 'law'"),
        ({**BODY, "name": "a\nb"}, r"got 'a\\nb'"),
        ({**BODY, "messages": MESSAGES}, "prompt and messages: expected one of them, got both"),
        ({"name": "contract"}, "prompt and messages: expected one of them, got neither"),
        ({**BODY, "budget": 0}, "budget: expected at least 1"),
        ({**BODY, "budget": "5"}, "budget: expected an integer"),
        ({**BODY, "text": "abc"}, "text: expected name, prompt, messages, budget"),
        ({**BODY, "prompt": ""}, "prompt: expected a text"),
    ],
    ids=str,
)
async def test_what_is_no_document_is_refused_before_the_engine_hears_of_it(body, words):
    world = World()
    with pytest.raises(SnapKVError, match=words) as refused:
        await world.documents.register("", body)
    assert status_of(refused.value) == 400
    assert world.engine.held == {}


async def test_of_two_registrations_under_one_name_one_is_made():
    world = World()
    both = [world.documents.register("", BODY) for _ in range(2)]
    found = await asyncio.gather(*both, return_exceptions=True)
    assert [isinstance(one, RefusedError) for one in found] == [False, True]
    world.require_in_step()


async def test_the_least_recently_used_makes_room_but_none_that_is_in_use():
    world = World(most_bytes=80)
    for name in "xy":
        await world.documents.register("", {**BODY, "name": name})
    async with world.documents.named("", "x"):
        await world.documents.register("", {**BODY, "name": "z"})
        assert world.names() == ["x", "z"]
        world.require_in_step()
        async with world.documents.named("", "z"):
            with pytest.raises(RefusedError, match="--share-bytes") as refused:
                await world.documents.register("", {**BODY, "name": "w"})
            assert status_of(refused.value) == 507
    await world.documents.register("", {**BODY, "name": "w"})
    assert world.names() == ["w", "z"]
    assert world.reasons == ["least_used", "least_used"]
    world.require_in_step()


async def test_a_deleted_document_is_dropped_when_its_last_request_has_ended():
    world = World()
    document = await world.documents.register("", BODY)
    async with world.documents.named("", "contract"):
        with suppress(ZeroDivisionError):
            async with world.documents.named("", "contract"):
                await world.documents.delete("", "contract")
                raise ZeroDivisionError
        assert world.names() == []
        assert document.document_id in world.engine.held
        again = await world.documents.register("", BODY)
        world.require_in_step()
    assert list(world.engine.held) == [again.document_id]
    world.require_in_step()


async def test_a_client_that_goes_away_leaves_its_document_whole():
    world = World()
    world.engine.reading.clear()
    client = asyncio.create_task(world.documents.register("", BODY))
    await asyncio.sleep(0)
    client.cancel()
    with suppress(asyncio.CancelledError):
        await client
    waiting = asyncio.create_task(world.documents.register("", {**BODY, "name": "next"}))
    await asyncio.sleep(0)
    assert world.names() == []
    world.engine.reading.set()
    await waiting
    assert world.names() == ["contract", "next"]
    world.require_in_step()


@pytest.mark.parametrize(
    ("error", "status"),
    [(OutOfMemoryError("no blocks"), 507), (PromptTooLongError("too long"), 400)],
)
async def test_what_the_engine_refuses_leaves_nothing_behind(error, status):
    world = World()
    world.engine.refusal = error
    with pytest.raises(SnapKVError, match=str(error)) as refused:
        await world.documents.register("", BODY)
    assert status_of(refused.value) == status
    assert world.names() == []
    world.engine.refusal = None
    await world.documents.register("", BODY)
    world.require_in_step()


async def test_a_document_that_cannot_be_read_makes_no_other_one_go():
    world = World(most_bytes=80)
    await world.documents.register("", BODY)
    world.engine.longest = 20
    with pytest.raises(SnapKVError, match="expected a shorter one"):
        await world.documents.register("", {"name": "long", "prompt": "a" * 30})
    assert world.names() == ["contract"]
    world.require_in_step()


async def test_registrations_wait_in_a_line_that_ends():
    world = World(most_bytes=100_000)
    world.engine.reading.clear()
    bodies = [{**BODY, "name": f"n{number}"} for number in range(66)]
    line = [asyncio.create_task(world.documents.register("", body)) for body in bodies]
    await asyncio.sleep(0)
    assert [one.done() for one in line] == [False] * 64 + [True] * 2
    with pytest.raises(RefusedError, match=r"fewer than 64 .* of one key") as refused:
        await line[-1]
    assert status_of(refused.value) == 503
    with suppress(RefusedError):
        await line[-2]
    world.engine.reading.set()
    await asyncio.gather(*line[:64])
    assert len(world.names()) == 64
    await world.documents.register("", {**BODY, "name": "late"})


async def test_every_key_has_a_line_of_its_own_and_the_lines_take_turns():
    world = World(most_bytes=100_000)
    world.engine.reading.clear()
    line = [
        asyncio.create_task(world.documents.register(tenant, {**BODY, "name": f"n{number}"}))
        for tenant, number in [*(("a", n) for n in range(64)), ("b", 0), ("b", 1), ("c", 0)]
    ]
    for _ in range(3):  # the first is being read, and all others wait
        await asyncio.sleep(0)
    assert not any(one.done() for one in line)
    world.engine.reading.set()
    await asyncio.gather(*line)
    made = sorted(
        (one for tenant in "abc" for one in world.documents.catalogue.all_of(tenant)),
        key=lambda one: list(world.engine.held).index(one.document_id),
    )
    assert [one.tenant for one in made] == [*"abcab", *"a" * 62]


def test_the_log_has_a_line_for_each_that_is_registered_dropped_and_deleted(caplog):
    mine, theirs = tenant_of([(b"authorization", b"Bearer mine")]), "theirs-hashed"

    async def run(world):
        for name in "xy":
            await world.documents.register(mine, {**BODY, "name": name})
        await world.documents.register(theirs, {**BODY, "name": "z"})
        await world.documents.delete(theirs, "z")

    with caplog.at_level(logging.INFO, logger="vllm.snapkv"):
        asyncio.run(run(World(most_bytes=80)))
    own = f"key {mine[:8]}"
    assert caplog.messages == [
        f"Document 'x' of {own} is registered: 4 of 4 tokens kept, 40 B",
        f"Document 'y' of {own} is registered: 4 of 4 tokens kept, 40 B",
        f"Document 'x' of {own} is dropped: key theirs-h needs room",
        "Document 'z' of key theirs-h is registered: 4 of 4 tokens kept, 40 B",
        "Document 'z' of key theirs-h is deleted",
    ]
