"""Checks of the compression settings in a request body, before vLLM reads it."""

import json

import pytest

from snapkv.errors import InvalidArgumentError, SnapKVError
from snapkv_vllm import Sessions
from snapkv_vllm.admission.names import ENDPOINTS_WITHOUT_XARGS, REQUEST_SETTINGS
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.front.bodies import check_body, require_settings
from snapkv_vllm.server import command_line

SETTINGS = ServingSettings(budget=512)
RIGHT = {"vllm_xargs": {"snapkv_budget": 64, "session": "mine"}}


@pytest.mark.parametrize(
    "body",
    [
        None,
        7,
        [],
        ["snapkv_budget"],
        {},
        {"prompt": "snapkv_budget"},
        RIGHT,
        {**RIGHT, "vllm_xargs": None},
        {**RIGHT, "vllm_xargs": "snapkv_budget"},  # vLLM itself refuses it
        {"sampling_params": {"extra_args": {"snapkv_budget": 64}}},
        {"sampling_params": 7, "extra_body": [1], "use_beam_search": True},
        {"metadata": {"snapkv_run": "7", "budget": 64}},
        {"thinking_token_budget": 64, "documents": [], "Budget": 64, "vllm_xargs": {"Budget": 64}},
    ],
    ids=str,
)
def test_correct_settings_and_unrelated_fields_are_accepted(body):
    require_settings(body, SETTINGS)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"vllm_xargs": {"snapkv_budget": 2}}, "snapkv_budget: expected a value above window_size"),
        ({"sampling_params": {"extra_args": {"snapkv_budget": 2}}}, "expected a value above"),
        ({"snapkv_budget": 64}, 'Write "vllm_xargs": {"snapkv_budget": ...}'),
        ({"SnapKV-Budget": 64}, 'SnapKV-Budget: .* Write "vllm_xargs": {"snapkv_budget": ...}'),
        *(
            ({name: 64}, f'{name}: .* ignored .* Write "vllm_xargs": {{"snapkv_{name}": ...}}')
            for name in REQUEST_SETTINGS
        ),
        ({"sampling_params": {"budget": 64}}, 'Write "vllm_xargs": {"snapkv_budget": ...}'),
        ({"extra_body": {"vllm_xargs": {"decay": 64}}}, "decay: .* ignored unless it is inside"),
        ({"sampling_params": {"snapkv_decay": 0.9}}, "snapkv_decay: this setting is ignored"),
        ({"extra_body": RIGHT}, "snapkv_budget: this setting is ignored"),
        ({"extra_args": {"snapkv_budget": 64}}, "snapkv_budget: this setting is ignored"),
        ({**RIGHT, "use_beam_search": True}, "snapkv_budget: .* with use_beam_search"),
        ({"vllm_xargs": {"budget": 64}}, "budget: .* Use snapkv_budget"),
        ({"vllm_xargs": {"protect_first": 4}}, "Use snapkv_protect_first"),
        ({"vllm_xargs": {"snapkv_document": "law"}}, "snapkv_document: this server has no setting"),
        ({"vllm_xargs": {"snapkv-window-size": 16}}, "Use snapkv_window_size"),
        ({"vllm_xargs": {"SNAPKV_DECAY": 0.9}}, "Use snapkv_decay"),
        ({"vllm_xargs": {"snapkv": 64}}, "snapkv: .* Use snapkv_budget"),
        ({"vllm_xargs": {"snapkv_\n": 1}}, r"snapkv_\\n: .* only snapkv_budget"),
    ],
    ids=str,
)
def test_wrong_and_misplaced_settings_are_refused_by_name(body, words):
    with pytest.raises(SnapKVError, match=words.replace("{", r"\{").replace("...}", r"...\}")):
        require_settings(body, SETTINGS)


NAMED = "expected a text of 1 to 256 characters"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"snapkv_spans": [], "vllm_xargs": {"snapkv_spans": "[]"}}, "snapkv_spans: .* twice"),
        ({"snapkv_spans": [], "vllm_xargs": "x"}, "vllm_xargs: expected a JSON object"),
        ({"session_id": "a", "vllm_xargs": {"snapkv_session": "a"}}, "snapkv_session: .* twice"),
        ({"session_id": "a", "agent_hint": {"session_id": "b"}}, "session_id: .* not the same"),
        ({"agent_hint": "run"}, "agent_hint: expected a JSON object, but got"),
        (
            {"agent_hint": {"session_id": "a", "parent": "b"}},
            "only have the field session_id, but got 'parent'",
        ),
        ({"agent_hint": {"session_id": 7}}, f"agent_hint: session_id: {NAMED}"),
        *(({"session_id": name}, f"session_id: {NAMED}") for name in (7, "", "a/" + "x" * 255)),
        ({"agent_hints": {"session_id": "a"}}, "Use agent_hint"),
        ({"agentHint": {"session_id": "a"}}, "Use agent_hint"),
        ({"agent_hint": {"sesion_id": "a"}}, "only have the field session_id, but got 'sesion_id'"),
        ({"vllm_xarg": {"snapkv_budget": 64}}, "no field with this name. Use vllm_xargs"),
    ],
    ids=str,
)
def test_wrong_or_misspelled_session_and_spans_are_refused_by_name(body, words):
    settings = ServingSettings(sessions=Sessions())
    with pytest.raises(SnapKVError, match=words):
        check_body(json.dumps(body).encode(), settings, "/v1/chat/completions")


@pytest.mark.parametrize("hint", [None, {}, {"session_id": None}], ids=str)
def test_hint_without_a_name_is_no_session(hint):
    body = json.dumps({"agent_hint": hint}).encode()
    settings = ServingSettings(sessions=Sessions())
    assert check_body(body, settings, "/v1/chat/completions") == body


def test_misspelled_session_is_refused_without_sessions():
    with pytest.raises(SnapKVError, match="Use session_id"):
        check_body(b'{"agent_hint": {"sesion_id": "a"}}', SETTINGS, "/v1/chat/completions")


@pytest.mark.parametrize("path", ENDPOINTS_WITHOUT_XARGS)
def test_setting_is_refused_at_endpoints_that_ignore_it(path):
    with pytest.raises(SnapKVError, match=f"the endpoint {path} ignores all settings in"):
        require_settings(RIGHT, SETTINGS, path)
    require_settings({"vllm_xargs": {"session": "mine"}}, SETTINGS, path)
    require_settings({"sampling_params": {"extra_args": RIGHT["vllm_xargs"]}}, SETTINGS, path)


@pytest.mark.parametrize(
    "options",
    [
        ["--additional-config", "{}"],
        ["--additional_config={}"],
        ["--additional-config.mine", "1"],
        ["--dtype", "float32", "--logits-processors", "mine:Own"],
        ["--scheduler-cls", "mine.Own"],
        ["--worker_cls=mine.Own"],
    ],
    ids=str,
)
def test_option_that_would_override_a_printed_one_is_refused(options):
    """vLLM uses the last one, so the server would use other settings or check nothing."""
    with pytest.raises(InvalidArgumentError, match="--print-command prints"):
        command_line("folder", SETTINGS, options, name="demo")


def test_long_name_is_refused_in_one_short_line():
    with pytest.raises(InvalidArgumentError) as refused:
        require_settings({"vllm_xargs": {"snapkv_" + "é\n" * 100_000: 1}}, SETTINGS)
    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()


MANY = {f"theirs_{number}": number for number in range(1001)}


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (MANY, "body"),
        ({"vllm_xargs": MANY}, "vllm_xargs"),
        ({"sampling_params": MANY}, "sampling_params"),
        ({"sampling_params": {"extra_args": MANY}}, "vllm_xargs"),
        ({"extra_body": MANY}, "extra_body"),
        ({"extra_args": MANY}, "extra_args"),
        ({"extra_body": {"vllm_xargs": MANY}}, "extra_body: vllm_xargs"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_too_many_names_are_refused_before_any_name_is_checked(body, place, monkeypatch):
    """The check of each name would delay all other requests."""
    looked_at = []
    for module in ("admission.names", "front.bodies"):
        monkeypatch.setattr(f"snapkv_vllm.{module}.correct_name", looked_at.append)
    said = f"^{place}: expected at most 1,000 names in the object, but got 1,001. Remove"
    with pytest.raises(InvalidArgumentError, match=said):
        require_settings(body, SETTINGS)
    assert len(looked_at) <= 100  # fields of an ordinary body around them


def test_thousand_unrelated_settings_are_accepted():
    fewer = dict(list(MANY.items())[:1000])
    require_settings({"vllm_xargs": fewer, "metadata": MANY, "extra_body": fewer}, SETTINGS)
