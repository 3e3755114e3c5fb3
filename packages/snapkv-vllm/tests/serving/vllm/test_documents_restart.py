"""A server that is killed, what it leaves, and the documents that its successor finds."""

import json
import re
import urllib.request

import torch

from snapkv import CompressedCache, SnapKV
from tests.serving.vllm.models import generated
from tests.serving.vllm.servers import Server

PATH = "/v1/snapkv/documents"
TEXT = "The tenant pays the rent on the third day of the month. " * 30
ASKED = {"prompt": "\nQuestion: Who pays?", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def asked(server, name):
    status, said = server.post("/v1/completions", naming(name))
    assert status == 200, said
    return json.loads(said)["choices"][0]["text"]


def naming(name):
    return {**ASKED, "vllm_xargs": {"snapkv_document": name}}


def registered(server, **body):
    text = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + PATH, text, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def librarys(small, ids):
    """A cache of the library that has read a text."""
    cache = CompressedCache(small.model, SnapKV(64, window_size=16))
    with torch.no_grad():
        small.model(torch.tensor([ids]), past_key_values=cache)
    return cache


def test_a_killed_servers_documents_come_back_unread(served, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    ids, question = (tokenizer(text)["input_ids"] for text in (TEXT, ASKED["prompt"]))
    folder = tmp_path / "documents"
    options = ("--budget", "64", "--share", "--share-folder", str(folder))
    with Server(tmp_path, *options, model=served.folder) as server:
        made = registered(server, name="contract", prompt=TEXT)
        answer = asked(server, "contract")
        cache = librarys(served, ids)
        cache.save(folder / "mine.safetensors", beside={"input_ids": torch.tensor([ids])})
        registered(server, name="mine", file="mine.safetensors")
        mine = asked(server, "mine")
        (metrics,) = server.kill()  # the engine goes with the process that answers, and its counts
        assert not metrics.exists()
    assert mine == tokenizer.decode(generated(served.model, ids + question, cache, 8))
    (folder / "everybody" / "broken.json").write_text("{")
    told = {"VLLM_LOGGING_LEVEL": "INFO"}
    with Server(tmp_path, *options, model=served.folder, **told) as server:
        found = json.loads(server.get(PATH))
        assert [one["name"] for one in found] == ["contract", "mine"]
        assert {**found[0], "last_used": 0, "requests": 0} == {**made, "last_used": 0}
        assert server.metric("vllm:prompt_tokens_total") < 10
        assert asked(server, "contract") == answer
        assert asked(server, "mine") == mine
        assert "broken.json" in server.output()
        start = r"Compressing prompts: policy snapkv, budget 64, .*, cap 0, .*, share a quarter of"
        assert len(re.findall(start, server.output())) == 1
        assert "Document 'contract' of everybody is registered: 64 of" in server.output()
        with urllib.request.urlopen(f"{server.url}{PATH}/contract/file", timeout=60) as sent:
            (tmp_path / "sent").write_bytes(sent.read())
        request = urllib.request.Request(f"{server.url}{PATH}/contract", method="DELETE")
        assert urllib.request.urlopen(request, timeout=60).status == 204
        left = sorted(path.name for path in (folder / "everybody").iterdir())
        assert left == ["broken.json", "mine.json", "mine.safetensors"]
    cache, beside = CompressedCache.load_with(tmp_path / "sent", served.model)
    assert beside["input_ids"].tolist() == [ids]
    assert cache.kept_positions(0).shape[-1] == 64
