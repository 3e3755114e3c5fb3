"""The documents of an engine: whose blocks they are, and who is using them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv

from snapkv.errors import UnsupportedModelError
from snapkv.policies import AdaKV, KVzip, Policy
from snapkv.validation import DEFAULT_BUDGET, DEFAULT_WINDOW, format_bytes
from snapkv_vllm.blocks import CompressedManager
from snapkv_vllm.documents.plans import FromDocument, ReadTwice, piece_tokens
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.documents.protocol import DOCUMENT, REGISTER, DocumentLimits, DocumentRequest
from snapkv_vllm.names import wrong
from snapkv_vllm.plans import PrefixReuse, ReconstructionPass, RequestPlan
from snapkv_vllm.settings import ServingSettings


@dataclass(kw_only=True)
class RegisteredDocument:
    """One document; `plan` is that of requests that begin with it."""

    plan: FromDocument
    blocks: Sequence[list[Any]] = ()  # of every group; none while it is being read

    @property
    def prefix(self) -> CachedPrefix:
        return self.plan.prefix


class Registry:
    """Documents by identifier. They share the pool of blocks with requests, up to a number."""

    def __init__(
        self,
        managers: Mapping[int, CompressedManager],
        settings: ServingSettings,
        vllm_config: Any,
        kv_cache_config: Any,
    ) -> None:
        assert settings.sharing is not None
        if len(managers) < len(kv_cache_config.kv_cache_groups):
            raise UnsupportedModelError(
                "snapkv: cannot share documents: expected full attention in every layer, got "
                "layers of another kind, which cannot read a text again; leave --share out"
            )
        self._managers, self._safeguard = list(managers.values()), settings.safeguard
        self._chunk_tokens = settings.sharing.chunk_tokens
        self._max_model_len = vllm_config.model_config.max_model_len
        asked = settings.sharing.most_bytes, "--share-bytes"
        most_bytes, per_token = room_of(vllm_config, kv_cache_config, *asked)
        self.limits = DocumentLimits(
            block_tokens=max(manager.block_size for manager in self._managers),
            bytes_per_token=per_token,
            most_tokens=most_bytes // per_token,
            budget=settings.budget or DEFAULT_BUDGET,
        )
        self._held: dict[str, RegisteredDocument] = {}  # that requests may name
        self._used_by: dict[str, RegisteredDocument] = {}  # which request begins with which
        self._registering: dict[str, str] = {}

    # What requests ask for.

    def plan_of_asked(self, asked: DocumentRequest, request: Any) -> RequestPlan:
        plan_of = self._begin if asked.verb == DOCUMENT else self._register
        return plan_of(asked, request)

    def _begin(self, asked: DocumentRequest, request: Any) -> RequestPlan:
        if not self.holds(asked.document_id):
            got = "one that is not, or not any more"
            raise wrong(DOCUMENT, "a document that is registered", got, "register it again")
        held = self._held[asked.document_id]
        tokens, length = len(held.prefix.token_ids), request.num_prompt_tokens
        if length <= tokens:
            expected = f"something asked after the document's {tokens:,} tokens"
            raise wrong(DOCUMENT, expected, f"a prompt of {length:,}", "ask something")
        if tuple(request.prompt_token_ids[:tokens]) != held.prefix.token_ids:
            expected = "a prompt that begins with the document's tokens"
            raise wrong(DOCUMENT, expected, "one that does not", "begin it with them")
        self._used_by[request.request_id] = held
        return held.plan

    def _register(self, asked: DocumentRequest, request: Any) -> RequestPlan:
        if asked.document_id in self._held:
            raise wrong(REGISTER, "a new identifier", "one in use", "pass another one")
        if self._registering:
            got = "one while another is being read"
            raise wrong(REGISTER, "one document at a time", got, "register it when that is done")
        ids = tuple(request.prompt_token_ids[:-1])
        size = self.limits.block_tokens
        whole, kept = len(ids) // size * size, self.limits.kept_tokens(len(ids), asked.budget)
        if kept > (free := self._free_tokens):
            most = f"at most {free:,} tokens kept, which other documents leave"
            remedy = "drop one, or start the server with more --share-bytes"
            raise wrong("document", most, f"{kept:,}", remedy)
        is_whole = kept == whole  # what its last block lacks is read with every request
        prefix = CachedPrefix(
            token_ids=ids[:whole] if is_whole else ids,
            kept_tokens=kept,
            reused_tokens=kept,
            per_head_budget=self._safeguard is not None and not is_whole,
        )
        plan = RequestPlan()
        if not is_whole:
            plan = self._read_twice(prefix, asked.instruction_ids)
        self._held[asked.document_id] = RegisteredDocument(plan=FromDocument(prefix=prefix))
        self._registering[request.request_id] = asked.document_id
        return plan

    def _read_twice(self, prefix: CachedPrefix, instruction: tuple[int, ...]) -> ReadTwice:
        tokens, kept = len(prefix.token_ids), prefix.kept_tokens
        positions = self._max_model_len - tokens
        chunk = piece_tokens(tokens, len(instruction), self._chunk_tokens, positions)
        scores = KVzip(kept, window_size=min(DEFAULT_WINDOW, kept // 2), chunk_tokens=chunk)
        policy: Policy = scores
        if self._safeguard is not None:
            page_tokens = self.limits.block_tokens
            policy = AdaKV(scores, safeguard=self._safeguard, page_tokens=page_tokens)
        return ReadTwice(
            prefix=prefix,
            instruction_ids=instruction,
            chunk_tokens=chunk,
            choice=ReconstructionPass(policy, tokens),
        )

    # What a front end asks, between two steps.

    def room(self) -> dict[str, int]:
        """The limits by their names."""
        return vars(self.limits)

    def adopt(self, document_id: str, prefix: Mapping[str, Any]) -> list[list[int]] | None:
        """Take blocks for a document that workers then fill; nobody may name it before.

        `prefix` are the attributes of its `CachedPrefix`. Returns the blocks of every group; None
        where there are too few.
        """
        own = CachedPrefix(**{**prefix, "token_ids": tuple(prefix["token_ids"])})
        needed = sum(cdiv(own.kept_tokens, manager.block_size) for manager in self._managers)
        free = self._managers[0].block_pool.get_num_free_blocks()
        if needed > free or own.kept_tokens > self._free_tokens:
            return None
        blocks = [manager.take_for_others(own.kept_tokens) for manager in self._managers]
        plan = FromDocument(prefix=own, is_adopted=True)
        self._held[document_id] = RegisteredDocument(plan=plan, blocks=blocks)
        return [[block.block_id for block in of_group] for of_group in blocks]

    def holds(self, document_id: str) -> bool:
        """Whether requests may name a document: it has been read, and was not dropped."""
        held = self._held.get(document_id)
        return held is not None and bool(held.blocks)

    def drop(self, document_id: str) -> None:
        """Let no later request name a document; one that is being read stays."""
        if self.holds(document_id):
            self._release(self._held.pop(document_id))

    @property
    def _free_tokens(self) -> int:
        """What documents may hold next to those there are, or that were dropped in use."""
        held = {id(one): one for one in (*self._held.values(), *self._used_by.values())}
        size = self.limits.block_tokens
        taken: int = sum(cdiv(one.prefix.kept_tokens, size) for one in held.values())
        return (self.limits.most_tokens // size - taken) * size

    # Of requests under way.

    def reused_blocks(self, request_id: str) -> tuple[FromDocument, tuple[list[Any], ...]] | None:
        """What a request begins with: the plan, and the blocks of every group."""
        held = self._used_by.get(request_id)
        if held is None:
            return None
        for manager in self._managers:
            manager.begin_with(request_id, held.prefix.dropped_tokens)
        counts = (held.prefix.reused_tokens // manager.block_size for manager in self._managers)
        blocks = zip(held.blocks, counts, strict=True)
        return held.plan, tuple(of_group[:count] for of_group, count in blocks)

    def prefix_reuse(self, request_id: str) -> PrefixReuse | None:
        """What workers are told of a request that begins with a document; None for all others."""
        held = self._used_by.get(request_id)
        if held is None:
            return None
        first_block = held.blocks[0][0].block_id if held.prefix.per_head_budget else None
        of_groups = zip(self._managers, held.blocks, strict=True)
        moves = (
            manager.copies(request_id, blocks, held.prefix.reused_tokens)
            for manager, blocks in of_groups
        )
        copies = tuple(move for move in moves if move.sources)
        return PrefixReuse(held.prefix.dropped_tokens, first_block, copies)

    def request_ends(self, request_id: str, *, is_complete: bool) -> None:
        """Take over what a request has registered, or give back what it reuses.

        To be called before its blocks are freed; `is_complete` says that it was not aborted.
        """
        if (held := self._used_by.pop(request_id, None)) is not None:
            self._release(held)
        document_id = self._registering.pop(request_id, None)
        if document_id is None:
            return
        held = self._held[document_id]
        kept, dropped = held.prefix.kept_tokens, held.prefix.dropped_tokens
        # One that was preempted may end with a token sampled before; it holds nothing then.
        if not is_complete or not all(
            manager.holds(request_id, kept, dropped) for manager in self._managers
        ):
            del self._held[document_id]
        else:
            held.blocks = [manager.keep_for_others(request_id, kept) for manager in self._managers]

    def _release(self, held: RegisteredDocument) -> None:
        """Free the blocks of a document that nobody can name and nobody uses."""
        if any(held is one for one in (*self._held.values(), *self._used_by.values())):
            return
        for manager, blocks in zip(self._managers, held.blocks, strict=True):
            manager.give_up(blocks)


def room_of(
    vllm_config: Any, kv_cache_config: Any, asked_bytes: int, option: str, beside_bytes: int = 0
) -> tuple[int, int]:
    """What may be held besides the largest request, which must always have room.

    `asked_bytes` is what `option` says, 0 for a quarter; `beside_bytes` are held by others.

    Returns:
        Bytes, and how many of them a token takes in all layers.
    """
    groups, blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
    sizes = [group.kv_cache_spec.block_size for group in groups]
    of_groups = zip(groups, sizes, strict=True)
    per_token = sum(_block_bytes(group) // size for group, size in of_groups)
    of_block = block_bytes(kv_cache_config)
    longest = sum(cdiv(vllm_config.model_config.max_model_len, size) for size in sizes)
    free_bytes = (blocks - 1 - longest) * of_block - beside_bytes  # one block is never used
    most_bytes = asked_bytes or min(blocks * of_block // 4, free_bytes)
    if most_bytes > free_bytes or most_bytes < per_token * max(sizes):
        raise UnsupportedModelError(
            f"snapkv: cannot share documents, or hold sessions: expected "
            f"{format_bytes(max(most_bytes, 1))} of the cache next to the longest request, "
            f"got {format_bytes(max(0, free_bytes))}; lower {option} or --max-model-len, or raise "
            "--kv-cache-memory-bytes"
        )
    return most_bytes, per_token


def block_bytes(kv_cache_config: Any) -> int:
    """What a block of the pool takes, which all groups share."""
    return max(map(_block_bytes, kv_cache_config.kv_cache_groups))


def _block_bytes(group: Any) -> int:
    spec = group.kv_cache_spec
    if hasattr(spec, "kv_cache_specs"):  # of layers that differ in size
        return sum(one.page_size_bytes for one in spec.kv_cache_specs.values())
    return len(group.layer_names) * int(spec.page_size_bytes)
