"""A library's documents, compressed here and in few bits, answer on a server as in the library."""

import json
import urllib.error
import urllib.request

import pytest
from transformers import AutoTokenizer

from snapkv import AcrossLayers, FullCache, KVzap, Library
from snapkv.library.about import question_ids
from snapkv.library.searching import Hit
from tests.gates import drawn_gate
from tests.serving.vllm.servers import Server

TEXTS = {
    "contracts/lease.md": "The tenant pays the rent on the third day of the month. " * 30,
    "loan": "The bank lends forty thousand crowns. Interest is four percent a year. " * 20,
    "note": "Milk.",
}
PATH = "/v1/snapkv/documents"
QUESTION = "Who pays, and when?"
ASKED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(served):
    return AutoTokenizer.from_pretrained(served.folder)


@pytest.fixture(scope="module")
def library(served, tokenizer, tmp_path_factory):
    config = served.model.config
    gate = drawn_gate(config.num_hidden_layers, served.kv_heads, config.head_dim)
    policy = AcrossLayers(KVzap(keep_ratio=0.3, window_size=4, gate=gate))
    library = Library(tmp_path_factory.mktemp("library"))
    library.add(served.model, tokenizer, TEXTS.items(), policy, bits="int8")
    return library


@pytest.fixture(scope="module")
def server(served, library, tmp_path_factory):
    options = ("--policy", "adakv", "--budget", "64", "--share", "--share-library")
    folder = tmp_path_factory.mktemp("server")
    with Server(folder, *options, str(library.path), model=served.folder) as running:
        yield running


def librarys(served, tokenizer, library, name, question=QUESTION):
    (record,) = (one for one in library.documents if one.name == name)
    place = {"span": (0, 1), "lines": (1, 1), "passage": record.text[:1], "score": 1.0}
    hit = Hit(key=record.key, name=name, tokens=record.tokens, **place)
    inputs = library.inputs(
        served.model, tokenizer, question, [hit], policy=FullCache(), recompute=0
    )
    output = served.model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def chat(server, name, messages=None, **more):
    messages = messages or [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "vllm_xargs": {"snapkv_document": name}, **ASKED, **more}
    status, said = server.post("/v1/chat/completions", {**body, "skip_special_tokens": False})
    return status, json.loads(said)


@pytest.mark.parametrize("name", TEXTS)
def test_a_chat_about_a_librarys_document(served, tokenizer, library, server, name):
    status, said = chat(server, name)
    assert status == 200, said
    expected = librarys(served, tokenizer, library, name)
    assert said["choices"][0]["message"]["content"] == expected


def test_a_completion_about_a_librarys_document(served, tokenizer, library, server):
    """What stands behind the document is then the whole end of the template."""
    asked = tokenizer.decode(question_ids(tokenizer, QUESTION))
    body = {"prompt": asked, "vllm_xargs": {"snapkv_document": "loan"}, **ASKED}
    status, said = server.post("/v1/completions", {**body, "skip_special_tokens": False})
    assert status == 200, said
    found = json.loads(said)["choices"][0]["text"]
    assert found == librarys(served, tokenizer, library, "loan")


def test_what_the_library_has_is_listed_and_stays(server, library):
    listed = {one["name"]: one for one in json.loads(server.get(PATH))}
    tokens = {record.name: record.tokens for record in library.documents}
    assert listed.keys() == tokens.keys()
    assert {one["kind"] for one in listed.values()} == {"library"}
    assert json.loads(server.get(f"{PATH}/loan"))["tokens"] > tokens["loan"]
    request = urllib.request.Request(f"{server.url}{PATH}/loan", method="DELETE")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 404
    status, said = server.post(PATH, {"name": "note", "prompt": "Milk."})
    assert (status, "which the library has" in said) == (409, True)


def test_a_document_that_is_added_again_or_removed_is_another_one(
    served, tokenizer, library, server
):
    text = "The ferry leaves at nine. " * 12
    library.add(served.model, tokenizer, [("ferry", text)])
    assert chat(server, "ferry")[0] == 200
    library.add(served.model, tokenizer, [("ferry", text.replace("nine", "ten"))])
    status, said = chat(server, "ferry")
    expected = librarys(served, tokenizer, library, "ferry")
    assert (status, said["choices"][0]["message"]["content"]) == (200, expected)
    library.remove(["ferry"])
    status, said = chat(server, "ferry")
    assert (status, "expected one of this key's documents" in said["error"]["message"]) == (
        404,
        True,
    )


def test_what_cannot_be_served_is_said_in_a_line(served, tokenizer, library, server):
    long = "All work and no play makes Jack a dull boy. " * 250
    library.add(served.model, tokenizer, [("long", long)])
    refusals = {
        "long": (chat(server, "long"), "fewer than 2,048 tokens"),
        "nothing": (chat(server, "nothing"), "snapkv_document: expected one of"),
        "system": (
            chat(server, "loan", [{"role": "system", "content": "Be brief."}]),
            "in which the chat template puts others there",
        ),
    }
    library.remove(["long"])
    for (status, said), words in refusals.values():
        assert status in (400, 404)
        assert words in said["error"]["message"]
        assert "\n" not in said["error"]["message"]
    assert chat(server, "loan")[0] == 200


def test_a_killed_server_leaves_no_engine_and_no_folder_of_counts(server):
    """The last one, after which it does not answer."""
    assert server.metric("snapkv:documents") > 0
    (counts,) = server.kill()
    assert not counts.exists()
