"""Documents that outlive their server, in a folder."""

import asyncio
import json
import logging

import pytest

from snapkv.cache.saving.files import seal_of, write_sealed
from snapkv.document_files import from_record
from snapkv.errors import OutOfMemoryError, OutputError, SnapKVError
from snapkv_vllm.documents.folder import DocumentFolder
from snapkv_vllm.names import RefusedError, status_of
from tests.serving.documents.fakes import World

BODY = {"name": "contract", "prompt": "abc"}
MESSAGES = [{"role": "system", "content": "abc"}]


def world_in(folder, **own):
    return World(folder=DocumentFolder(folder), **own)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def put(folder, ids, kept, name="mine"):
    write_sealed(folder / name, {}, {"ids": ids, "kept": kept})


async def test_what_was_registered_stands_again_as_it_was(tmp_path):
    first = world_in(tmp_path)
    made = [
        await first.documents.register("", BODY),
        await first.documents.register("ab12", {"name": "rules", "messages": MESSAGES}),
    ]
    assert files(tmp_path) == [
        "ab12/rules.json",
        "ab12/rules.safetensors",
        "everybody/contract.json",
        "everybody/contract.safetensors",
    ]
    note = from_record((tmp_path / "ab12/rules.json").read_text())
    seal = seal_of(tmp_path / "ab12/rules.safetensors")
    assert note == {
        "name": "rules",
        "messages": MESSAGES,
        "seal": seal,
        "created": made[1].created,
    }
    again = world_in(tmp_path)
    assert await again.restored() == ["contract"]
    assert await again.restored("ab12") == ["rules"]
    for one in made:
        found = again.documents.catalogue.find(one.tenant, one.name)
        assert (found.kind, found.token_ids, found.messages) == (
            one.kind,
            one.token_ids,
            one.messages,
        )
        assert (found.kept_tokens, found.created) == (one.kept_tokens, one.created)
        assert found.document_id in again.engine.held
        assert found.document_id != one.document_id


@pytest.mark.parametrize("name", ["a b", "a.json", ".a", "ä%", "é" * 100, "x" * 100])
async def test_any_name_is_a_files_name(tmp_path, name):
    await world_in(tmp_path).documents.register("", {**BODY, "name": name})
    again = world_in(tmp_path)
    assert await again.restored() == [name]
    assert again.documents.file("", name).is_file()
    await again.documents.delete("", name)
    assert files(tmp_path) == []


async def test_what_goes_for_room_stays_in_the_folder_until_it_is_deleted(tmp_path):
    world = world_in(tmp_path, most_bytes=40)
    for name in "xy":
        await world.documents.register("", {**BODY, "name": name})
    assert await world.restored() == ["y"]
    assert await world_in(tmp_path).restored() == ["x", "y"]
    small = world_in(tmp_path, most_bytes=40)
    assert await small.restored() == ["y"]
    await small.documents.delete("", "x")
    assert await world_in(tmp_path).restored() == ["y"]
    with pytest.raises(RefusedError) as refused:
        await small.documents.delete("", "x")
    assert status_of(refused.value) == 404


def change(path, old, new):
    path.write_text(path.read_text().replace(old, new))


async def test_a_bare_note_of_an_earlier_server_still_opens(tmp_path):
    await world_in(tmp_path).documents.register("", BODY)
    note = tmp_path / "everybody/contract.json"
    note.write_text(json.dumps(from_record(note.read_text())))
    assert await world_in(tmp_path).restored() == ["contract"]


NEVER = '{"name": "contract", "messages": null, "seal": "", "created": 1e999}'
"""A record as earlier servers wrote it, of a time that there is not."""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "contract.json").write_text("{"), "contract.json"),
        (lambda folder: (folder / "contract.json").write_text("[]"), "contract.json"),
        (lambda folder: (folder / "contract.json").write_text("[" * 100_000), "contract.json"),
        (lambda folder: (folder / "contract.json").write_text(NEVER), "created at inf"),
        (lambda folder: change(folder / "contract.json", "seal", "soul"), "contract.json"),
        (lambda folder: (folder / "contract.json").rename(folder / "b.json"), "'contract'"),
        (lambda folder: (folder / "contract.safetensors").unlink(), "saved before"),
        (lambda folder: put(folder, [1, 97], 2, "contract.safetensors"), "another one at"),
    ],
    ids=["cut", "list", "deep", "never", "changed", "renamed", "gone", "replaced"],
)
def test_what_is_damaged_is_left_with_one_line_and_the_others_stand(
    tmp_path, caplog, monkeypatch, damage, said
):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    async def run():
        world = world_in(tmp_path)
        for name in ("contract", "other"):
            await world.documents.register("", {**BODY, "name": name})
        damage(tmp_path / "everybody")
        before = files(tmp_path)
        again = world_in(tmp_path)
        assert await again.restored() == ["other"]
        assert len(again.engine.held) == 1
        assert files(tmp_path) == before

    asyncio.run(run())
    (line,) = [one.getMessage() for one in caplog.records if one.name == "vllm.snapkv"]
    assert said in line
    assert "\n" not in line


async def test_a_file_of_a_user_is_registered_and_copied(tmp_path):
    put(tmp_path, [1, 97, 98], 2)
    world = world_in(tmp_path)
    found = await world.documents.register("", {"name": "one", "file": "mine"})
    assert (found.kind, found.token_ids, found.kept_tokens) == ("prompt", (1, 97, 98), 2)
    (tmp_path / "mine").unlink()
    assert await world_in(tmp_path).restored() == ["one"]


async def test_a_file_of_a_chat_must_be_that_of_its_messages(tmp_path):
    world = world_in(tmp_path)
    chat = {"name": "rules", "messages": MESSAGES}
    ids = (await world.documents.register("", chat)).token_ids
    put(tmp_path, list(ids), 2)
    body = {"name": "one", "file": "mine"}
    found = await world.documents.register("", {**body, "messages": MESSAGES})
    assert (found.kind, found.token_ids, found.kept_tokens) == ("messages", ids, 2)
    other = [{"role": "system", "content": "abd"}]
    with pytest.raises(RefusedError, match="messages: expected those which"):
        await world.documents.register("", {**body, "name": "two", "messages": other})
    assert len(world.engine.held) == 2


@pytest.mark.parametrize(
    "file", ["../mine", "/etc/passwd", "..", ".", "", "everybody", "no", "out", 5, "a\0b", ["mine"]]
)
def test_files_elsewhere_are_refused(tmp_path, file):
    folder = tmp_path / "documents"
    (folder / "everybody").mkdir(parents=True)
    put(tmp_path, [1, 97], 2)
    (folder / "out").symlink_to(tmp_path / "mine")
    world = world_in(folder)
    with pytest.raises(RefusedError, match=r"^file: expected") as refused:
        asyncio.run(world.documents.register("", {"name": "one", "file": file}))
    assert status_of(refused.value) == 400
    assert world.engine.held == {}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "abc"}, "prompt: expected none beside file"),
        ({"budget": 5}, "budget: expected none beside file"),
    ],
)
def test_what_a_file_says_itself_is_refused_beside_it(tmp_path, body, words):
    with pytest.raises(RefusedError, match=words):
        asyncio.run(world_in(tmp_path).documents.register("", {"name": "a", "file": "b", **body}))


async def test_a_document_that_cannot_be_written_is_dropped(tmp_path):
    world = world_in(tmp_path)
    world.engine.full_disk = True
    with pytest.raises(OutputError) as refused:
        await world.documents.register("", BODY)
    assert status_of(refused.value) == 507
    assert (world.engine.held, await world.restored(), files(tmp_path)) == ({}, [], [])
    world.engine.full_disk = False
    await world.documents.register("", BODY)
    assert await world_in(tmp_path).restored() == ["contract"]


async def test_a_file_that_the_engine_has_no_blocks_for_leaves_nothing(tmp_path):
    put(tmp_path, [1, 97], 2)
    world = world_in(tmp_path)
    world.engine.refusal = OutOfMemoryError("no blocks")
    with pytest.raises(SnapKVError, match="no blocks"):
        await world.documents.register("", {"name": "one", "file": "mine"})
    assert (world.engine.held, files(tmp_path)) == ({}, ["mine"])


async def test_requests_wait_until_the_documents_stand(tmp_path):
    await world_in(tmp_path).documents.register("", BODY)
    world = world_in(tmp_path)
    world.engine.reading.clear()
    waiting = asyncio.create_task(world.restored())
    gone = asyncio.create_task(world.restored())
    await asyncio.sleep(0.05)
    gone.cancel()
    assert not waiting.done()
    world.engine.reading.set()
    assert await waiting == ["contract"]
    async with world.documents.named("", "contract") as found:
        assert found.requests == 1
    assert len(world.engine.held) == 1


async def test_files_are_their_own_tenants_alone_and_of_servers_with_a_folder(tmp_path):
    world = world_in(tmp_path)
    await world.documents.register("ab12", BODY)
    for documents, tenant in ((world.documents, ""), (World().documents, "ab12")):
        with pytest.raises(RefusedError, match="--share-folder") as refused:
            documents.file(tenant, "contract")
        assert status_of(refused.value) == 404
    assert world.documents.file("ab12", "contract").is_file()
    with pytest.raises(RefusedError, match="--share-folder"):
        await World().documents.register("", {"name": "a", "file": "b"})
