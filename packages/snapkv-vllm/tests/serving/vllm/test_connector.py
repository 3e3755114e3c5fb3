"""A KV connector beside compressed requests, which it never hears of."""

import pytest

from snapkv import SnapKV
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of

BUDGET, TOKENS = 64, 12
WHOLE = {"snapkv_budget": 0}


@pytest.fixture
def stored(tmp_path):
    """Folders of the prompts that the connector has stored."""
    return lambda: {path.parent.name for path in tmp_path.rglob("*.safetensors")}


@pytest.fixture
def engine(small, tmp_path):
    """With vLLM's example of a connector, which stores prompts in files and finds them again."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    options = {"max_num_batched_tokens": 512, "kv_transfer_config": connector}
    with small_engine(small, budget=BUDGET, **options) as running:
        yield running
        assert not running.scheduler._offers.requests
        running.require_empty()


def test_compressed_requests_are_neither_stored_nor_loaded_and_others_are(engine, small, stored):
    prompt, short = ids_of(300), ids_of(60, seed=1)
    compressed = small.answer(prompt, SnapKV(BUDGET), TOKENS)
    whole = small.answer(prompt, SnapKV(512), TOKENS)
    assert engine.answers([prompt], greedy(TOKENS)) == [compressed]
    assert not stored()
    assert engine.answers([prompt], greedy(TOKENS, extra_args=WHOLE)) == [whole]
    assert len(stored()) == 1
    # From here on the prompt could be loaded, which only the whole one is.
    settings = [greedy(TOKENS), greedy(TOKENS, extra_args=WHOLE), greedy(TOKENS)]
    outputs = engine.outputs([prompt, prompt, short], settings)
    answers = [list(one.outputs[0].token_ids) for one in outputs]
    assert answers == [compressed, whole, small.answer(short, SnapKV(512), TOKENS)]
    assert [one.num_cached_tokens for one in outputs] == [0, 288, 0]
    assert len(stored()) == 2
    engine.step()


def test_a_transfer_that_is_asked_for_is_refused_where_the_request_would_be_compressed(engine):
    from vllm.exceptions import VLLMValidationError

    asks = {"kv_transfer_params": {"do_remote_decode": True}}
    with pytest.raises(VLLMValidationError, match="kv_transfer_params: expected none with a requ"):
        engine.answers([ids_of(300)], greedy(1, extra_args=asks))
    engine.answers([ids_of(300)], greedy(1, extra_args=asks | WHOLE))
    engine.step()


def test_a_step_is_shown_without_hidden_requests():
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    from snapkv_vllm.connector import Offers

    class Connector:
        def get_num_new_matched_tokens(self, request, computed):
            return 7, True

        def update_state_after_alloc(self, request, blocks, tokens):
            raise AssertionError(request)

        on_new_request = update_state_after_alloc

    class Request:
        request_id = "b"

    connector = Connector()
    offers = Offers(connector)
    offers.hide("b")
    assert connector.get_num_new_matched_tokens(Request, 3) == (0, False)
    connector.update_state_after_alloc(Request, [], 0)
    connector.on_new_request(Request)
    Request.request_id = "a"
    assert connector.get_num_new_matched_tokens(Request, 3) == (7, True)
    cached = CachedRequestData(
        req_ids=["a", "b", "c"],
        resumed_req_ids={"b", "c"},
        new_token_ids=[],
        all_token_ids={"a": [1], "b": [2]},
        new_block_ids=[None, ([1],), ([2],)],
        num_computed_tokens=[1, 2, 3],
        num_output_tokens=[4, 5, 6],
    )
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"a": 1, "b": 2, "c": 3}, 6
    output.finished_req_ids, output.preempted_req_ids = {"d"}, {"b", "e"}
    seen = offers.without_hidden(output)
    assert seen.num_scheduled_tokens == {"a": 1, "c": 3}
    assert seen.total_num_scheduled_tokens == 4
    assert seen.preempted_req_ids == {"e"}
    assert seen.scheduled_cached_reqs == CachedRequestData(
        ["a", "c"], {"c"}, [], {"a": [1]}, [None, ([2],)], [1, 3], [4, 6]
    )
    assert output.scheduled_cached_reqs is cached
    output.finished_req_ids = {"b"}
    assert not offers.without_hidden(output).finished_req_ids
    assert not offers.hides("b")
