"""Shared documents as users of a server see them, in one process and in two."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from snapkv.policies.kvzip import INSTRUCTION
from tests.serving.vllm.models import ids_of, with_tokenizer
from tests.serving.vllm.servers import Server
from tests.serving.vllm.test_documents import Library
from tests.serving.vllm.test_parallel import TRACED

TEXT = ids_of(300, seed=5)
QUESTIONS = [ids_of(tokens, seed=tokens) for tokens in (1, 9, 40, 41)]
LONGEST, KEPT, ANSWER = 512, 64, 12
DOCUMENTS = "/v1/snapkv/documents"


@pytest.fixture(scope="module")
def even_heads(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("even-heads"))


def ask(server, question, **more):
    body = {"prompt": question, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    own = {"return_token_ids": True, "vllm_xargs": {"snapkv_document": "text"}}
    status, said = server.post("/v1/completions", body | own | more)
    assert status == 200, said
    return [one["token_ids"] for one in json.loads(said)["choices"]]


def expected(model, question):
    """The library reads in the pieces that the server's positions allow."""
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    instruction = tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    chunk = LONGEST - len(TEXT) - len(instruction)
    library = Library(model.model, KEPT, chunk, instruction)
    return library.answer(TEXT, question, ANSWER)


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--tensor-parallel-size", "2"), marks=pytest.mark.slow),
        pytest.param(("--pipeline-parallel-size", "2", *TRACED), marks=pytest.mark.slow),
    ],
    ids=["one", "tensor", "pipeline"],
)
def test_many_ask_about_one_document(even_heads, options, second_runner, tmp_path):
    if second_runner and options:
        pytest.skip("several processes under Triton's interpreter: test_parallel.py has them")
    own = ["--policy", "snapkv", "--budget", "64", "--share", "--enable-prompt-tokens-details"]
    with Server(tmp_path, *own, *options, model=even_heads.folder, longest=LONGEST) as server:
        status, said = server.post(DOCUMENTS, {"name": "text", "prompt": TEXT})
        assert status == 201, said
        registered = json.loads(said)
        assert (registered["tokens"], registered["kept_tokens"]) == (len(TEXT), KEPT)
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            answers = list(pool.map(lambda question: ask(server, question), QUESTIONS))
        assert answers == [[expected(even_heads, question)] for question in QUESTIONS]
        assert ask(server, QUESTIONS[1], n=2, temperature=1, min_p=1) == answers[1] * 2
        body = {"prompt": QUESTIONS[1], "vllm_xargs": {"snapkv_document": "text"}}
        _, said = server.post("/v1/completions", body | {"max_tokens": 1})
        details = json.loads(said)["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == len(TEXT)
        assert server.metric("snapkv:documents") == 1
        assert server.metric("snapkv:document_bytes") == registered["bytes"]
        assert json.loads(server.get(DOCUMENTS))[0]["requests"] == 0
        assert server.post(DOCUMENTS, {"name": "text", "prompt": TEXT})[0] == 409
        whole = {"name": "whole", "prompt": TEXT, "budget": 1000}
        assert server.post(DOCUMENTS, whole)[0] == 201
        asked = {"questions": ["Why?", "Who was it?"], "max_tokens": 8}
        status, said = server.post(f"{DOCUMENTS}/whole/report", asked)
        assert (status, json.loads(said)["same"]) == (200, 2), said
        status, said = server.post(f"{DOCUMENTS}/text/report", asked)
        assert (status, json.loads(said)["of"]) == (200, 2), said
        status, said = server.post(
            "/v1/completions", body | {"vllm_xargs": {"snapkv_register": "x"}}
        )
        assert (status, "snapkv_register: expected one of" in said) == (400, True)
