"""vLLM's KV connector, to which no request is offered that is compressed.

What such a request holds is no prefix of anything. The connector is told nothing of it, from its
coming to its end, so it neither loads nor stores its blocks; all others it gets as ever.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

_INSTEAD: dict[str, Any] = {
    "get_num_new_matched_tokens": (0, False),  # none, now or later
    "update_state_after_alloc": None,
    "on_new_request": None,
}
"""What methods answer that vLLM calls with a request first, where it is hidden."""


class Offers:
    """Hides requests from a connector; what is said of them here is by their names."""

    def __init__(self, connector: Any) -> None:
        self._hidden: set[str] = set()
        for name, answer in _INSTEAD.items():
            setattr(connector, name, self._of_others(getattr(connector, name), answer))

    def _of_others(self, method: Callable[..., Any], answer: Any) -> Callable[..., Any]:
        def ask(request: Any, *args: Any, **kwargs: Any) -> Any:
            return answer if self.hides(request.request_id) else method(request, *args, **kwargs)

        return ask

    @property
    def requests(self) -> Iterable[str]:
        """Those that are hidden."""
        return self._hidden

    def hide(self, request_id: str) -> None:
        """Say nothing of a request that comes, until a step has said that it has ended."""
        self._hidden.add(request_id)

    def hides(self, request_id: str) -> bool:
        return request_id in self._hidden

    def without_hidden(self, output: Any) -> Any:
        """vLLM's `SchedulerOutput` of a step as the connector sees it."""
        hidden = frozenset(self._hidden)
        self._hidden -= output.finished_req_ids

        def seen(of_requests: dict[str, Any]) -> dict[str, Any]:
            return {name: one for name, one in of_requests.items() if name not in hidden}

        tokens = seen(output.num_scheduled_tokens)
        preempted = output.preempted_req_ids
        return replace(
            output,
            scheduled_new_reqs=[
                one for one in output.scheduled_new_reqs if one.req_id not in hidden
            ],
            scheduled_cached_reqs=_without_hidden(output.scheduled_cached_reqs, hidden),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=seen(output.scheduled_spec_decode_tokens),
            scheduled_encoder_inputs=seen(output.scheduled_encoder_inputs),
            finished_req_ids=output.finished_req_ids - hidden,
            preempted_req_ids=None if preempted is None else preempted - hidden,
        )


def _without_hidden(cached: Any, hidden: frozenset[str]) -> Any:
    """vLLM's `CachedRequestData` with the rows of other requests."""
    rows = [row for row, name in enumerate(cached.req_ids) if name not in hidden]

    def of_rows(values: list[Any]) -> list[Any]:
        return [values[row] for row in rows] if values else values  # some only in a pipeline

    return replace(
        cached,
        req_ids=of_rows(cached.req_ids),
        resumed_req_ids=cached.resumed_req_ids - hidden,
        new_token_ids=of_rows(cached.new_token_ids),
        all_token_ids={n: ids for n, ids in cached.all_token_ids.items() if n not in hidden},
        new_block_ids=of_rows(cached.new_block_ids),
        num_computed_tokens=of_rows(cached.num_computed_tokens),
        num_output_tokens=of_rows(cached.num_output_tokens),
    )
