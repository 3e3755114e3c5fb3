"""A library's documents on a server: loaded when they are named, and let go for room."""

import asyncio
import json
import os
from dataclasses import replace

import pytest

from snapkv import Library
from snapkv.app.models import load
from snapkv.errors import LibraryError, SnapKVError
from snapkv.hf.identity import identity_of
from snapkv_vllm.documents.library import ServedLibrary
from snapkv_vllm.names import RefusedError, status_of
from tests.serving.documents.fakes import FakeLibrary, World


@pytest.fixture
def library(tmp_path):
    library = FakeLibrary(tmp_path)
    for name in ("a-one", "two", "three"):
        library.write(name, list(range(9)), 4)
    return library


async def test_a_document_is_loaded_once_for_all_who_name_it(library):
    world = World(library=library)
    assert [one["bytes"] for one in await world.documents.listed("a")] == [0, 0, 0]

    async def asks(tenant):
        async with world.documents.named(tenant, "two") as document:
            await asyncio.sleep(0)
            return document.document_id, document.prefix

    found = await asyncio.gather(*map(asks, "abab"))
    assert len(set(found)) == len(world.engine.held) == 1
    prefix = found[0][1]
    assert (prefix.kept_tokens, prefix.token_ids) == (4, tuple(range(9)))
    assert [one["bytes"] for one in await world.documents.listed("b")] == [0, 40, 0]
    world.require_in_step()


async def test_those_that_nobody_uses_make_room_and_come_back(library):
    world = World(most_bytes=80, library=library)
    for name in ("a-one", "two", "three", "a-one"):
        async with world.documents.named("", name):
            world.require_in_step()
    assert world.names("library") == ["a-one", "three"]
    async with world.documents.named("", "a-one"), world.documents.named("", "two"):
        with pytest.raises(RefusedError, match="--share-bytes") as refused:
            async with world.documents.named("", "three"):
                pass
        assert status_of(refused.value) == 507
    world.require_in_step()


async def test_one_that_was_replaced_goes_when_its_requests_have_ended(library):
    world = World(library=library)
    async with world.documents.named("", "two"):
        library.write("two", [1, 2, 3], 2)
        async with world.documents.named("", "two") as document:
            assert document.prefix.token_ids == (1, 2, 3)
            assert len(world.engine.held) == 2
        assert world.documents.catalogue.bytes == 60
    assert list(world.engine.held) == [document.document_id]
    del library.of_name["two"]
    with pytest.raises(RefusedError, match="one of this key's documents") as refused:
        async with world.documents.named("", "two"):
            pass
    assert status_of(refused.value) == 404
    assert not world.engine.held
    world.require_in_step()


async def test_names_of_the_library_are_taken_and_those_that_stood_before_stay(library):
    world = World(library=library)
    with pytest.raises(RefusedError, match="which the library has") as refused:
        await world.documents.register("a", {"name": "two", "prompt": "abc"})
    assert status_of(refused.value) == 409
    await world.documents.register("a", {"name": "mine", "prompt": "abc"})
    library.write("mine", [1, 2, 3], 2)
    async with world.documents.named("a", "mine") as own:
        assert own.source is None
    async with world.documents.named("b", "mine") as other:
        assert other.prefix.token_ids == (1, 2, 3)


async def test_what_another_model_has_read_is_refused_and_nothing_held(library):
    library.is_others = True
    world = World(library=library)
    with pytest.raises(SnapKVError, match="expected another one"):
        async with world.documents.named("", "two"):
            pass
    assert not world.engine.held


# A real one.


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    demo, library = load("demo"), Library(tmp_path_factory.mktemp("library"))
    library.add(demo.model, demo.tokenizer, [("note", "Buy milk."), ("list", "Eggs.")])
    return library


def test_a_library_says_who_has_read_it_and_what_is_in_it(real):
    demo, served = load("demo"), ServedLibrary(real.path)
    served.require_read_by(identity_of(demo.model), demo.tokenizer)
    found, record = served.find("note"), next(one for one in real.documents if one.name == "note")
    assert (found, served.prefix_ids) == (record, real.about.prefix_ids)
    assert served.cache_file(found) == real.path / "caches" / record.cache
    assert served.find("no") is None
    assert [one.name for one in served.records()] == ["list", "note"]
    other = identity_of(demo.model) | {"weights": "0"}
    with pytest.raises(LibraryError, match=r"model: expected .*, which read this library's"):
        served.require_read_by(other, demo.tokenizer)
    with pytest.raises(LibraryError, match="library: expected a library, got none at"):
        ServedLibrary(real.path / "none")


def forged(record):
    """What whoever may write to the folder can put there as a record, sealed by itself."""
    yield replace(record, cache="../../secret.safetensors").as_json()
    yield replace(record, tokens="7").as_json()
    yield replace(record, chunks=((0, 1, 2),)).as_json()
    yield record.as_json().replace(json.dumps(record.name), "7", 1)
    yield "[" * 100_000


def test_a_forged_record_is_none_and_the_others_stand(real):
    (record,) = (one for one in real.documents if one.name == "note")
    place = real.path / "documents" / f"{record.key}.json"
    before = place.read_text()
    for content in forged(record):
        place.write_text(content)
        served = ServedLibrary(real.path)
        assert served.find("note") is None
        assert served.find("list") is not None
    place.unlink()
    os.mkfifo(place)
    assert ServedLibrary(real.path).find("note") is None
    place.unlink()
    place.write_text(before)
    assert ServedLibrary(real.path).find("note") is not None
