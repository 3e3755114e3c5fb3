"""One method for the prompt, another for what is generated behind it."""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies import checks
from snapkv.policies.base import EvictingPolicy, Need, Policy
from snapkv.policies.snapkv import SnapKV
from snapkv.policies.spans import Spans
from snapkv.policies.states import DecodeStep, Eviction, PromptLayer, Selection, VotesAtStake
from snapkv.policies.tova import TOVA


@dataclass(frozen=True)
class PromptThenDecode(EvictingPolicy):
    """Compresses the prompt by one method and evicts by another while generating.

    What the second method remembers of the prompt (H2O: the attention that every token received
    from all of it) is noted before the first one drops anything, and travels with the tokens that
    stay. Where `decode` has more room than `prompt` keeps, the cache grows up to it first.

    Args:
        prompt: what to keep of the prompt: a method with a budget that is the same for all heads,
            such as SnapKV.
        decode: what to evict afterwards: H2O, StreamingLLM, TOVA or another that evicts while
            generating.

    Raises:
        InvalidTypeError: not a policy, or one that cannot do this part.
        InvalidArgumentError: `decode` would drop at once what `prompt` has kept.
    """

    name: ClassVar[str] = "prompt-then-decode"

    _: KW_ONLY
    prompt: Policy = field(default_factory=SnapKV)
    decode: EvictingPolicy = field(default_factory=TOVA)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, Policy) or isinstance(self.prompt, EvictingPolicy):
            raise InvalidTypeError(
                f"prompt: expected a method that only compresses the prompt, such as "
                f"SnapKV(budget=1024), got {_named(self.prompt)}; pass a method that evicts while "
                "generating as decode"
            )
        if self.prompt.needs_reconstruction_pass:
            raise InvalidArgumentError(
                f"prompt: expected a method whose scores are complete with the prompt, got "
                f"{_named(self.prompt)}; use it by itself, or pass SnapKV"
            )
        if not isinstance(self.decode, EvictingPolicy) or isinstance(self.decode, PromptThenDecode):
            raise InvalidTypeError(
                f"decode: expected a method that evicts while generating, such as "
                f"TOVA(budget=1024), got {_named(self.decode)}; pass a method that only compresses "
                "the prompt as prompt"
            )
        if "rotation" in self.decode.needs:
            raise InvalidArgumentError(
                f"decode: expected a method that leaves positions as they are, since what the "
                f"prompt's method keeps has gaps, got {self.decode!r}; pass positions='original'"
            )
        self._require_room(self.prompt.most_tokens, self.decode.max_decode_tokens)

    def _require_room(self, most: int | None, room: int | None) -> None:
        """Raise unless what the prompt keeps fits into what is held while generating."""
        if room is None:
            raise InvalidArgumentError(
                f"decode: expected a method with a budget that is the same for all heads, got "
                f"{self.decode!r}, whose heads hold different numbers of tokens; use it by itself"
            )
        if most is None:
            wanted = (
                f"the same for all heads, since {self.decode.name} evicts from all of them alike"
                if self.prompt.per_head_budget
                else f"a number of tokens, since what stays must fit into the {room} of "
                f"{self.decode.name} whatever the prompt's length"
            )
            raise InvalidArgumentError(
                f"prompt: expected a method with a budget that is {wanted}, got {self.prompt!r}; "
                f"pass for instance SnapKV(budget={room})"
            )
        if most > room:
            raise InvalidArgumentError(
                f"decode: expected room for the {most} tokens that a layer may keep of the prompt "
                f"({self.prompt.name}), got {self.decode.name} with room for {room}, which would "
                f"drop the rest at once; give decode a budget of at least {most}"
            )

    @property
    def query_tokens(self) -> int:
        return max(self.prompt.query_tokens, self.decode.query_tokens)

    @property
    def per_query_head(self) -> bool:
        return self.prompt.per_query_head

    @property
    def promised_window(self) -> int:
        return self.prompt.promised_window

    @property
    def needs(self) -> frozenset[Need]:
        return self.prompt.needs | self.decode.needs

    @property
    def max_decode_tokens(self) -> int | None:
        return self.decode.max_decode_tokens

    @property
    def history_tokens(self) -> int:
        return self.decode.history_tokens

    def require_protection(self, spans: Spans) -> None:
        self.prompt.require_protection(spans)
        self.decode.require_protection(spans)

    def require_room(self, layer: PromptLayer) -> None:
        self.prompt.require_room(layer)

    def select(self, layer: PromptLayer) -> Selection:
        """Keep what `prompt` keeps, with what `decode` notes of it."""
        own = _with_queries(layer, self.prompt.query_tokens)
        selection = checks.select(self.prompt, own, [layer.layer_idx])
        if selection is None:
            selection = Selection.whole(layer)
        heads = max(layer.num_kv_heads, selection.keep_indices.shape[1])
        if heads != layer.num_kv_heads:  # stored per query head from now on, so noted as well
            layer = replace(layer, stored_heads=heads)
        noted = self.decode.note(_with_queries(layer, self.decode.query_tokens))
        return replace(selection, scores=noted)

    def votes_at_stake(self, layer: PromptLayer) -> VotesAtStake | None:
        return self.prompt.votes_at_stake(_with_queries(layer, self.prompt.query_tokens))

    def evict(self, step: DecodeStep) -> Eviction:
        return self.decode.evict(step)


def _with_queries(layer: PromptLayer, query_tokens: int) -> PromptLayer:
    """The layer with the last queries only, as many as a method has asked for."""
    start = max(0, layer.queries.shape[2] - query_tokens)
    return replace(layer, queries=layer.queries[:, :, start:]) if start else layer


def _named(value: object) -> str:
    return value.name if isinstance(value, Policy) else repr(value)
