"""Every endpoint of vLLM's server with a body uses, checks or refuses settings and sessions."""

import json
import typing

import pytest

from snapkv.errors import SnapKVError
from snapkv_vllm import Sessions
from snapkv_vllm.admission.names import (
    COUNTING_ENDPOINTS,
    ENDPOINTS_WITHOUT_XARGS,
    SESSION_ENDPOINTS,
)
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.front.bodies import check_body, require_settings

HEARING = {*SESSION_ENDPOINTS, "/v1/chat/completions/batch", "/invocations"}
"""Where settings inside `vllm_xargs` reach the engine."""

FORMS = {"/v1/audio/transcriptions", "/v1/audio/translations"}
"""Where a body is a form, whose settings are refused where they reach the engine's client."""

RENDERED = {
    *(f"/v1/{of}/render" for of in ("completions", "chat/completions", "messages", "responses")),
    "/cohere/v2/chat/render",
}
"""Where a request's tokens and settings are answered, to be sent on to another endpoint."""

OTHERS = {
    *COUNTING_ENDPOINTS,
    "/detokenize",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
    "/v1/responses/{response_id}/cancel",
    # Pooling models, which are refused at the start.
    *("/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/v1/embeddings", "/v2/embed"),
    # Of whoever runs the server.
    *("/ping", "/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/abort_requests", "/inference/v1/abort_requests", "/collective_rpc"),
    *("/fault_tolerance/apply", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    *("/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume"),
    *("/start_profile", "/stop_profile"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
    *("/start_weight_update", "/start_draft_weight_update", "/finish_weight_update"),
    *("/update_weights", "/update_weight_version", "/weight_checker"),
}
"""Where nothing is generated."""


@pytest.fixture(scope="module")
def paths():
    """Where vLLM's application takes a POST, with everything that can be switched on."""
    from vllm import tasks
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    named = [one for one in vars(tasks).values() if typing.get_origin(one) is typing.Literal]
    every = tuple(dict.fromkeys(word for one in named for word in typing.get_args(one)))
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "demo"])
    args.enable_fault_tolerance = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        app = build_app(args, every, None)
    found = {one.path for one in app.routes if "POST" in (getattr(one, "methods", None) or ())}
    assert found >= set(SESSION_ENDPOINTS)
    return found


def test_every_endpoint_of_vllm_is_listed(paths):
    """A new endpoint may generate, so it must use settings or refuse them."""
    assert paths <= HEARING | FORMS | RENDERED | set(ENDPOINTS_WITHOUT_XARGS) | OTHERS


@pytest.mark.parametrize("hint", [{"agent_hint": {"session_id": "a"}}, {"session_id": "a"}])
def test_session_is_used_or_refused_at_every_generating_endpoint(paths, hint):
    settings, body = ServingSettings(sessions=Sessions()), json.dumps(hint).encode()
    for path in paths - OTHERS - FORMS:
        if path in SESSION_ENDPOINTS:
            admitted = json.loads(check_body(body, settings, path))
            assert admitted == {**hint, "vllm_xargs": {"snapkv_session": "a"}}
        else:
            with pytest.raises(SnapKVError, match=r"session_id: .* ignores this setting. Send"):
                check_body(body, settings, path)


def test_settings_are_checked_or_refused_at_every_generating_endpoint(paths):
    settings = ServingSettings(budget=512, sessions=Sessions())
    for path in paths - OTHERS - FORMS:
        with pytest.raises(SnapKVError, match="snapkv_budget: "):
            require_settings({"vllm_xargs": {"snapkv_budget": 2}}, settings, path)
        right = {"vllm_xargs": {"snapkv_budget": 64}}
        if path in ENDPOINTS_WITHOUT_XARGS:
            with pytest.raises(SnapKVError, match="ignore"):
                require_settings(right, settings, path)
        else:
            require_settings(right, settings, path)


def test_session_is_ignored_at_endpoints_that_count_tokens():
    body = b'{"agent_hint": {"session_id": "a", "other": 1}}'
    for path in COUNTING_ENDPOINTS:
        assert check_body(body, ServingSettings(sessions=Sessions()), path) is body
