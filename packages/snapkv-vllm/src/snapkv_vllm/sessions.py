"""The compressed histories of sessions that an engine stores, and the requests that continue them.

The tokens that the last request of a session has read and generated stay in its blocks. The next
request sends all of them again, and as far as they are the same it begins with these blocks. Full
blocks may be shared by any number of requests, and the tokens after them are computed again. If no
block ends after the last compression, one request at a time may continue in the last block. A
preempted request begins with the same blocks again. A request that needs blocks makes the store
evict histories that no request uses.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.utils.math_utils import cdiv

from snapkv.errors import UnsupportedModelError, wrong
from snapkv.policies.spans import Spans
from snapkv.validation import format_bytes
from snapkv_vllm.admission.names import PREFIX, SESSION
from snapkv_vllm.admission.plans import Order, PromptPlan, TurnPlan
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.admission.spans import RequestSpans
from snapkv_vllm.blocks import CompressedManager
from snapkv_vllm.histories import CompressedPrefix, DigestedTokens, History, Owner, choose_evictions
from snapkv_vllm.metrics import Metrics, labels_of

_logger = logging.getLogger("vllm.snapkv")

_NAME = PREFIX + SESSION

_MAX_HISTORIES = 512
"""The largest number of histories of all tenants, because the ids of all their tokens are stored as
well.
"""

_MAX_HISTORIES_PER_SESSION = 32
"""The largest number of histories of one session: the conversation, its retries and its branches.
Each request of the session is compared with all of them.
"""


@dataclass(kw_only=True)
class _SessionRequest:
    """A request of a session, with the history from which it continues and the way in which it is
    compressed.
    """

    owner: Owner
    extra_args: Mapping[str, Any]  # the settings of the request
    prompt: DigestedTokens
    may_use_history: bool  # False if the request needs data of tokens that a history does not have
    spans: RequestSpans
    protected: Spans  # the spans that the request keeps whatever the votes
    plan: TurnPlan
    compressed: CompressedPrefix = field(
        default_factory=CompressedPrefix
    )  # that of its history, later its own
    history: History | None = None
    first_block: int | None = None  # the first block of its kept tokens, once it was compressed
    has_searched: bool = False  # True if no history was found and none has changed since


class SessionStore:
    """The stored histories of all sessions of an engine. Together they take a limited number of
    blocks, of which each tenant has an equal share.

    Args:
        managers: the block managers of all KV cache groups, by the index of the group.
        settings: the settings of the server, which must have sessions.
        vllm_config: the configuration of vLLM.
        kv_cache_config: the configuration of the cache.

    Raises:
        UnsupportedModelError: some layers have no full attention, or the cache is too small for the
            histories and the longest request.
    """

    def __init__(
        self,
        managers: Mapping[int, CompressedManager],
        settings: ServingSettings,
        vllm_config: Any,
        kv_cache_config: Any,
    ) -> None:
        """Compute how many blocks of the cache the histories may take, and set the metrics of
        sessions to 0.

        Raises:
            UnsupportedModelError: some layers have no full attention, or the cache is too small for
                the histories and the longest request.
        """
        assert settings.sessions is not None
        if len(managers) < len(kv_cache_config.kv_cache_groups):
            problem = "sessions need full attention in every layer, but some layers do not have it"
            raise wrong("snapkv", problem, "Remove --sessions", UnsupportedModelError)
        self._managers, self._settings = list(managers.values()), settings
        self._metrics = Metrics(**labels_of(vllm_config))
        self._block_bytes = max(map(_block_bytes, kv_cache_config.kv_cache_groups))
        most_bytes = self._max_bytes(vllm_config, kv_cache_config, settings.sessions.most_bytes)
        self._max_blocks = most_bytes // self._block_bytes
        self._sizes = [manager.block_size for manager in self._managers]
        self._block_tokens = max(self._sizes)
        self._held: list[History] = []  # least recently used first
        self._turns: dict[str, _SessionRequest] = {}
        self._forgotten: list[int] = []
        self._waiting: set[str] = set()  # requests that wait for blocks while histories are pinned
        for name in ("waits", "requests", "tokens_not_read", "histories_dropped"):
            self._metrics.count(f"session_{name}", 0)
        self.report_metrics()

    def _max_bytes(self, vllm_config: Any, kv_cache_config: Any, requested_bytes: int) -> int:
        """Return how many bytes the histories may take, so that there is always enough memory left
        for the longest request.

        Args:
            vllm_config: the configuration of vLLM.
            kv_cache_config: the configuration of the cache.
            requested_bytes: the limit that the user has set; 0 for a quarter of the cache, or less
                if the longest request leaves less.

        Raises:
            UnsupportedModelError: the longest request leaves less than `requested_bytes`, or less
                than a block.
        """
        groups, blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
        sizes = [group.kv_cache_spec.block_size for group in groups]
        of_groups = zip(groups, sizes, strict=True)
        per_token = sum(_block_bytes(group) // size for group, size in of_groups)
        longest = sum(cdiv(vllm_config.model_config.max_model_len, size) for size in sizes)
        free_bytes = (blocks - 1 - longest) * self._block_bytes  # vLLM never uses one of its blocks
        most_bytes = requested_bytes or min(blocks * self._block_bytes // 4, free_bytes)
        if most_bytes > free_bytes or most_bytes < per_token * max(sizes):
            needed, free = format_bytes(max(most_bytes, 1)), format_bytes(max(0, free_bytes))
            problem = f"histories need {needed}, but the longest request leaves only {free}"
            remedy = (
                "Reduce --session-bytes or --max-model-len, or increase --kv-cache-memory-bytes"
            )
            raise wrong("snapkv", problem, remedy, UnsupportedModelError)
        return most_bytes

    # New requests.

    def plan_request(self, request: Any, plan: PromptPlan) -> PromptPlan:
        """Record a new request, and return its plan without a history. A history is chosen later,
        by `plan_next`.

        A request without a session, or whose prompt is not text, is not recorded and keeps `plan`.

        Args:
            request: vLLM's request, whose settings must have been checked.
            plan: its plan without a session.
        """
        params = request.sampling_params
        extra_args = dict((params and params.extra_args) or {})
        if _NAME not in extra_args or not _is_text(request):
            return plan
        lora = request.lora_request
        adapter = "" if lora is None else lora.lora_name
        owner = (extra_args[_NAME], adapter, request.cache_salt or "")
        spans = self._settings.spans_of_request(extra_args)
        tokens, policy = plan.prompt_tokens, plan.policy
        may_use_history = params.prompt_logprobs is None and not request.skip_reading_prefix_cache
        turn = self._turns[request.request_id] = _SessionRequest(
            owner=owner,
            extra_args=extra_args,
            prompt=DigestedTokens.from_ids(request.prompt_token_ids),
            may_use_history=may_use_history,
            spans=spans,
            protected=self._settings.protected_spans_of(extra_args, tokens),
            plan=TurnPlan(prompt_tokens=tokens, policy=policy, protect_first=plan.protect_first),
        )
        return turn.plan

    def plan_next(self, request_id: str) -> PromptPlan | None:
        """Choose the history of a request that is about to be scheduled, and return the plan of the
        request. The result is None if the request has no session.

        The history that is chosen is pinned until the request has ended. If there is one already,
        or the histories of the session have not changed since the last search, the plan is returned
        without a search. A request that needs data of tokens which histories do not have gets none.
        """
        turn = self._turns.get(request_id)
        if turn is None:
            return None
        if turn.may_use_history and turn.history is None and not turn.has_searched:
            turn.has_searched = True
            self._choose_history(turn)
            if turn.history is not None:
                self._pin_history(turn.history, request_id, turn.plan)
        return turn.plan

    def _choose_history(self, turn: _SessionRequest) -> None:
        """Choose the history that covers the largest part of the prompt, and set `turn.history`,
        `turn.compressed` and `turn.plan`. Nothing is set if no history can be used. The history is
        not pinned yet.

        Tokens are compared first. A plan is made only for a history that may cover more of the
        prompt than the best one so far.
        """
        tokens, longest = len(turn.prompt), 0
        candidates = []
        for history in self._held:
            if history.owner == turn.owner:
                same = turn.prompt.count_common_tokens(history.tokens)
                most = history.usable_tokens(min(same, tokens - 1), self._block_tokens)
                candidates.append((most, same, history))
        for most, same, history in sorted(candidates, key=lambda one: one[0], reverse=True):
            if most <= longest:
                return
            planned = self._plan_after(turn, history)
            if planned is None:
                continue
            plan, voters = planned
            begins = history.usable_tokens(min(same, tokens - voters), self._block_tokens)
            if begins > longest and history.tokens.has_same_prefix(turn.prompt, begins):
                longest, turn.history, turn.compressed = begins, history, history.compressed
                turn.plan = TurnPlan(
                    prompt_tokens=tokens,
                    policy=plan.policy,
                    protect_first=plan.protect_first,
                    prefix_tokens=begins,
                    dropped_tokens=history.compressed.dropped_tokens,
                )

    def _plan_after(self, turn: _SessionRequest, history: History) -> tuple[PromptPlan, int] | None:
        """Plan a request that continues from the given history.

        If the prompt has fewer new tokens than the method needs queries, the plan compresses
        nothing but its spans, and a later request will compress.

        Args:
            turn: the request; it is not changed.
            history: a history of the same session.

        Returns:
            The plan, and how many last tokens of the prompt must be computed, at least 1. None if
            the edits of spans of the request and of the history do not go together; see
            `CompressedPrefix.remaining_edits`.
        """
        prefix, tokens = history.compressed, len(turn.prompt)
        left = prefix.remaining_edits(turn.spans, turn.protected)
        if left is None:
            return None
        held_tokens = tokens - prefix.dropped_tokens
        plan = self._settings.plan_turn(turn.extra_args, held_tokens, left)
        ends = plan.next_compression(0, 0)
        voters = max(1, 0 if ends is None else ends.selector.query_tokens)
        if tokens - voters >= prefix.tokens:
            return plan, voters
        # There are fewer new tokens than voters, so a later request will compress.
        return self._settings.plan_turn(turn.extra_args, held_tokens, left, votes=False), 1

    def _reset_searches(self, owner: Owner) -> None:
        """Let all waiting requests of a session search for a history again, because its histories
        have changed.
        """
        for turn in self._turns.values():
            if turn.owner == owner:
                turn.has_searched = False

    def _pin_history(self, history: History, request_id: str, plan: TurnPlan) -> None:
        """Keep a history until the request has ended, and make it the most recently used history.
        Other requests of the session search again.

        Args:
            history: a stored history, changed in place. If the request continues inside the last
                block, the tokens after that point are removed from it, because they will be
                overwritten.
            request_id: the id of the request.
            plan: the plan of the request, which says with how many tokens of the history it begins.
        """
        history.requests.add(request_id)
        history.last_used = time.time()
        self._held.remove(history)
        self._held.append(history)
        if (plan.prefix_tokens - plan.dropped_tokens) % self._block_tokens:
            history.tokens = history.tokens.truncate(plan.prefix_tokens)
        self._reset_searches(history.owner)

    def reused_blocks(self, request_id: str) -> tuple[TurnPlan, tuple[list[Any], ...]] | None:
        """Return the plan of a request and the blocks of its history with which it begins. The
        block managers are told that it begins with these blocks.

        Returns:
            The plan, and a list of blocks for each KV cache group; None if the request has no
            history.
        """
        turn = self._turns.get(request_id)
        if turn is None or turn.history is None:
            return None
        held = turn.plan.prefix_tokens - turn.plan.dropped_tokens
        for manager in self._managers:
            manager.begin_with_history(request_id, turn.plan.dropped_tokens)
        of_groups = zip(turn.history.blocks, self._sizes, strict=True)
        return turn.plan, tuple(blocks[: cdiv(held, size)] for blocks, size in of_groups)

    def dropped_tokens_of(self, request_id: str) -> int:
        """Return how many tokens were dropped from the history with which a request begins. The
        result is 0 if it has no history.
        """
        turn = self._turns.get(request_id)
        return 0 if turn is None or turn.history is None else turn.plan.dropped_tokens

    def pop_forgotten(self) -> tuple[int, ...]:
        """Return the histories whose data the workers must forget, each as the number of its first
        block. A second call returns only what was added since.

        These are all histories that were removed, and requests whose kept tokens were given up,
        because the request was preempted or left no history. Blocks with which a stored history
        begins are left out.
        """
        # Branches of a session may share their first blocks.
        held = {one.first_block for one in self._held}
        forgotten, self._forgotten = set(self._forgotten) - held, []
        return tuple(forgotten)

    def record_compression(self, request_id: str, order: Order) -> None:
        """Record that a request is compressed at the end of the current step. Nothing happens if
        the request has no session or the order is not due.

        Args:
            request_id: the id of the request.
            order: its order, with its moves.
        """
        turn = self._turns.get(request_id)
        if turn is None or not order.is_due:
            return
        seen, kept = order.seen_tokens, order.kept_tokens
        turn.compressed = CompressedPrefix(
            tokens=seen, kept_tokens=kept, drop=turn.spans.drop, protected=turn.protected
        )
        turn.first_block = order.moves[0].targets[0]

    def record_preemption(self, request_id: str) -> None:
        """Record that a request was preempted: it has freed its blocks and will begin again, with
        the same history. A request without a session is ignored.
        """
        turn = self._turns.get(request_id)
        if turn is not None and turn.first_block is not None:
            self._forgotten.append(turn.first_block)
            turn.first_block = None

    def record_wait(self, request_id: str) -> None:
        """Count and log a request that has to wait for blocks, if histories that other requests pin
        have blocks which no request uses. A request is counted only once.
        """
        pinned = self._count_unused_blocks(one for one in self._held if one.requests - {request_id})
        if pinned and request_id not in self._waiting:
            self._waiting.add(request_id)
            self._metrics.count("session_waits")
            self.report_metrics()
            message = "Request %s waits for blocks while histories of other requests pin %s blocks"
            _logger.info(message, request_id, pinned)

    def _count_unused_blocks(self, histories: Iterable[History]) -> int:
        """Count the blocks of some histories that are not used by any request. A block that several
        of them share is counted once.
        """
        of_groups = zip(*(one.blocks for one in histories), strict=True)
        kept = zip(self._managers, of_groups, strict=False)
        return sum(manager.count_unused_blocks(blocks) for manager, blocks in kept)

    # Calls of the web server.

    def list_sessions(self, prefix: str) -> list[dict[str, Any]]:
        """Return a description of each history whose session name begins with `prefix`. The history
        that was used least recently comes first.

        Returns:
            For each history, as JSON values: "session", the name without `prefix`; "tokens", all of
            its tokens; "kept_tokens" that are stored per KV head; "bytes" in the cache; "requests",
            how many running ones begin with it; "last_used", in seconds since the epoch.
        """
        return [
            {
                "session": one.owner[0].removeprefix(prefix),
                "tokens": len(one.tokens),
                "kept_tokens": one.held_tokens,
                "bytes": one.block_count(self._sizes) * self._block_bytes,
                "requests": len(one.requests),
                "last_used": int(one.last_used),
            }
            for one in self._held
            if one.owner[0].startswith(prefix)
        ]

    def delete_session(self, session: str) -> dict[str, int]:
        """Remove all histories of a session, unless a request of the session is still running or
        waiting.

        Args:
            session: the name of the session after the tenant and a slash, as `add_tenant` writes
                it.

        Returns:
            A dict with the keys "histories" and "requests": how many of each the session had. If it
            had requests, nothing was removed.
        """
        own = [one for one in self._held if one.owner[0] == session]
        requests = sum(turn.owner[0] == session for turn in self._turns.values())
        if not requests:
            for one in own:
                self._forget(one)
            self.report_metrics()
        return {"histories": len(own), "requests": requests}

    # Requests that have ended.

    def store_history(self, request: Any) -> None:
        """Forget an ended request, and store the tokens that it has computed as a history of its
        session.

        The history replaces the one with which the request began, and those of the same prompt,
        unless another request uses them. Nothing is stored if the request has no session, has not
        read all of its prompt, would leave nothing that a later request can use, or if there cannot
        be enough space. The caller must free the blocks of the request afterwards.

        Args:
            request: vLLM's request.
        """
        self._waiting.discard(request.request_id)
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return
        if turn.history is not None:
            turn.history.requests.discard(request.request_id)
            self._reset_searches(turn.owner)
            if request.num_computed_tokens >= request.num_prompt_tokens:
                self._metrics.count("session_requests")
                self._metrics.count("session_tokens_not_read", turn.plan.prefix_tokens)
        new = self._make_history(turn, request)
        replaced = [] if new is None else self._find_replaced(new, turn.history)
        if new is not None and self._make_space(new, replaced):
            for manager in self._managers:
                tokens = new.held_tokens
                new.blocks = [*new.blocks, manager.pin_blocks(request.request_id, tokens)]
            self._held.append(new)
            self._reset_searches(turn.owner)
            for one in replaced:
                self._forget(one)
        elif turn.first_block is not None:
            self._forgotten.append(turn.first_block)

    def _make_history(self, turn: _SessionRequest, request: Any) -> History | None:
        """Build the history of an ended request, still without its blocks.

        The result is None if the history could not be used: the prompt was not read to its end, the
        blocks do not hold its tokens, or it was not compressed and fills no block. Tokens after the
        last full block are left out if a request would compute them again in any case.
        """
        seen = min(request.num_computed_tokens, len(request.all_token_ids))
        dropped = turn.compressed.dropped_tokens
        holds = (one.holds(request.request_id, seen - dropped, dropped) for one in self._managers)
        if seen < request.num_prompt_tokens or not all(holds):
            return None
        full = (seen - dropped) // self._block_tokens * self._block_tokens
        if full and full + dropped >= turn.compressed.tokens:
            seen = full + dropped  # a partial block after it would be computed again in any case
        elif not turn.compressed.tokens:
            return None
        tokens = DigestedTokens.from_ids(request.all_token_ids[:seen])
        prompt = hashlib.sha256(turn.prompt.ids.data).digest()
        return History(owner=turn.owner, prompt=prompt, tokens=tokens, compressed=turn.compressed)

    def _find_replaced(self, new: History, before: History | None) -> list[History]:
        """Return the stored histories that a new one replaces, without those that a request uses.

        Args:
            new: the new history, which is not stored yet. It replaces all histories of the same
                prompt and owner.
            before: the history from which the new one continues, which it replaces as well; None if
                there is none.
        """
        return [
            one
            for one in self._held
            if not one.requests
            and (one is before or (one.owner, one.prompt) == (new.owner, new.prompt))
        ]

    def _make_space(self, new: History, replaced: Sequence[History]) -> bool:
        """Evict unused histories until there is enough space for `new`, and return True. If there
        cannot be enough space, evict nothing and return False.

        The limits are the histories of one session, and the blocks and the number of all histories.

        Args:
            new: the history that will be stored; its blocks are not needed yet.
            replaced: histories that the caller will remove, which are counted as gone.
        """
        others = [one for one in self._held if one not in replaced]
        of_name = [one for one in others if one.owner[0] == new.owner[0]]
        idle_of_name = [one for one in of_name if not one.requests]
        beyond = max(0, len(of_name) + 1 - _MAX_HISTORIES_PER_SESSION)
        if beyond > len(idle_of_name):
            return False
        evicted = idle_of_name[:beyond]
        measures: tuple[tuple[int, Callable[[History], int]], ...] = (
            (self._max_blocks, lambda one: one.block_count(self._sizes)),
            (_MAX_HISTORIES, lambda one: 1),
        )
        for most, size_of in measures:
            taken: Counter[str] = Counter()
            staying = [one for one in others if one not in evicted]
            for one in (new, *staying):
                taken[one.tenant] += size_of(one)
            idle = [one for one in staying if not one.requests]
            leaving, lacking = choose_evictions(idle, taken, most, size_of)
            if lacking:
                return False
            evicted += leaving
        for one in evicted:
            self._evict(one)
        return True

    def evict_least_recent(self) -> bool:
        """Evict the least recently used history that no request uses, and return True. If every
        history is used or there is none, return False.
        """
        idle = next((one for one in self._held if not one.requests), None)
        if idle is not None:
            self._evict(idle)
            self.report_metrics()
        return idle is not None

    def _evict(self, history: History) -> None:
        self._forget(history)
        self._metrics.count("session_histories_dropped")

    def remove_idle(self) -> None:
        """Remove all histories that no request uses, without counting them as evicted."""
        for one in [one for one in self._held if not one.requests]:
            self._forget(one)
        self.report_metrics()

    def _forget(self, history: History) -> None:
        """Remove a history, release its blocks, and let waiting requests of its session search
        again. Workers are told by the next `pop_forgotten`.
        """
        self._held.remove(history)
        self._reset_searches(history.owner)
        self._forgotten.append(history.first_block)
        for manager, blocks in zip(self._managers, history.blocks, strict=True):
            manager.unpin_blocks(blocks)

    def report_metrics(self) -> None:
        """Set the metrics of the stored histories to their current values. If a request has ended,
        the caller must have freed its blocks.
        """
        blocks = sum(one.block_count(self._sizes) for one in self._held)
        self._metrics.set("session_histories", len(self._held))
        self._metrics.set("session_bytes", blocks * self._block_bytes)
        for state in ("idle", "pinned"):
            found = (one for one in self._held if bool(one.requests) == (state == "pinned"))
            self._metrics.set("session_blocks", self._count_unused_blocks(found), state=state)


def _block_bytes(group: Any) -> int:
    """Return the number of bytes that a block takes in all layers of one KV cache group."""
    spec = group.kv_cache_spec
    if hasattr(spec, "kv_cache_specs"):  # layers of different sizes
        return sum(one.page_size_bytes for one in spec.kv_cache_specs.values())
    return len(group.layer_names) * int(spec.page_size_bytes)


def _is_text(request: Any) -> bool:
    return request.prompt_token_ids is not None and not request.mm_features
