"""What a server says about shared documents, and what it cannot be together with."""

import json

import pytest

from snapkv.errors import InvalidArgumentError, InvalidTypeError, SnapKVError
from snapkv_vllm import Limits, ServingSettings
from snapkv_vllm.documents.sharing import Sharing


@pytest.mark.parametrize(
    ("sharing", "entry"),
    [
        (None, None),
        (Sharing(), {}),
        (Sharing(most_bytes=2**31), {"most_bytes": 2**31}),
        (Sharing(folder="/kept"), {"folder": "/kept"}),
        (Sharing(chunk_tokens=64, across_keys=True), {"chunk_tokens": 64, "across_keys": True}),
    ],
    ids=str,
)
def test_it_travels_in_the_settings(sharing, entry):
    settings = ServingSettings(budget=64, sharing=sharing)
    config = json.loads(json.dumps(settings.to_config()))
    assert config["snapkv"].get("sharing") == entry
    assert ServingSettings.from_config(config) == settings


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        ({"most_bytes": -1}, InvalidArgumentError, "most_bytes: expected at least 0"),
        ({"most_bytes": "2GiB"}, InvalidTypeError, "most_bytes: expected an integer"),
        ({"chunk_tokens": 0}, InvalidArgumentError, "chunk_tokens: expected at least 1"),
        ({"across_keys": 1}, InvalidTypeError, "across_keys: expected true or false, got 1"),
        ({"folder": 1}, InvalidTypeError, "folder: expected a path, got 1"),
        ({"bytes": 1}, InvalidArgumentError, "sharing: expected most_bytes, .* did you mean"),
    ],
)
def test_wrong_values_are_refused_by_name(entry, error, words):
    with pytest.raises(error, match=words):
        ServingSettings.from_config({"snapkv": {"sharing": entry}})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limits": Limits(cap=2048)}, "^cap: expected none where documents .* got 2048.* --cap"),
        (
            {"limits": Limits(decode_budget=2048)},
            "^decode_budget: expected none where documents .* got 2048.* --decode-budget",
        ),
    ],
)
def test_promises_that_a_document_would_break_are_refused(settings, words):
    assert ServingSettings(**settings).sharing is None
    with pytest.raises(SnapKVError, match=words):
        ServingSettings(**settings, sharing=Sharing())


def test_a_request_that_names_a_document_stays_whole():
    settings = ServingSettings(budget=64, sharing=Sharing())
    assert settings.for_request({"snapkv_document": "contract", "other": 1}) is None
    assert settings.for_request({}) is not None


@pytest.mark.parametrize(
    ("sharing", "given", "words"),
    [
        (None, {"snapkv_document": "a"}, "snapkv_document: .* start the server with --share"),
        (Sharing(), {"snapkv_document": "a", "snapkv_budget": 64}, "^snapkv_budget: .* beside"),
        (Sharing(), {"snapkv_document": "a", "snapkv_x": 1}, "^snapkv_x: expected none beside"),
        (Sharing(), {"snapkv_document": ""}, "snapkv_document: expected 1 to 100 printable"),
        (Sharing(), {"snapkv_document": "a/b"}, "none of them a slash"),
        (Sharing(), {"snapkv_document": 7}, "snapkv_document: expected a document's name, got"),
        (Sharing(), {"snapkv_document": None}, "snapkv_document: expected a document's name"),
        (Sharing(), {"SNAPKV_DOCUMENT": "a"}, "write snapkv_document"),
    ],
)
def test_a_document_is_named_alone_and_where_documents_are_shared(sharing, given, words):
    with pytest.raises(SnapKVError, match=words):
        ServingSettings(budget=64, sharing=sharing).for_request(given)
