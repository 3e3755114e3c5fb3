"""One method for the prompt, and another for the tokens that are generated after it."""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

from snapkv.errors import InvalidTypeError, wrong
from snapkv.policies import checks
from snapkv.policies.base import EvictingPolicy, Need, Policy
from snapkv.policies.snapkv import SnapKV
from snapkv.policies.spans import Spans
from snapkv.policies.states import DecodeStep, Eviction, PromptLayer, Selection, VotesAtStake
from snapkv.policies.tova import TOVA


@dataclass(frozen=True)
class PromptThenDecode(EvictingPolicy):
    """Compresses the prompt with one policy, and evicts tokens during decoding with another one.

    The second method scores all tokens of the prompt before the first one drops any (H2O: the
    attention that every token received), and the scores stay with the tokens that are kept. If
    `decode` holds more tokens than `prompt` keeps, the cache first grows up to its budget.

    Args:
        prompt: the method that compresses the prompt, with a number of tokens as its budget and the
            same number for all heads, such as SnapKV.
        decode: the method that evicts afterwards: H2O, StreamingLLM, TOVA or another that evicts
            during decoding.

    Raises:
        InvalidTypeError: `prompt` does not compress prompts only, or `decode` does not evict during
            decoding.
        InvalidArgumentError: `decode` would drop at once what `prompt` has kept, or the two methods
            cannot be combined: `prompt` reads the text twice or has no fixed number of tokens, or
            `decode` moves positions or lets heads hold different numbers of tokens.
    """

    name: ClassVar[str] = "prompt-then-decode"

    _: KW_ONLY
    prompt: Policy = field(default_factory=SnapKV)
    decode: EvictingPolicy = field(default_factory=TOVA)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, Policy) or isinstance(self.prompt, EvictingPolicy):
            problem = f"expected a method that compresses prompts, but got {_named(self.prompt)}"
            remedy = "Use a method such as SnapKV(budget=1024), and pass this method as decode"
            raise wrong("prompt", problem, remedy, InvalidTypeError)
        if self.prompt.needs_reconstruction_pass:
            problem = f"{_named(self.prompt)} has to read the prompt twice to score the tokens"
            raise wrong("prompt", problem, "Use this method alone, or use SnapKV for the prompt")
        if not isinstance(self.decode, EvictingPolicy) or isinstance(self.decode, PromptThenDecode):
            problem = f"expected a method that evicts while decoding, but got {_named(self.decode)}"
            remedy = "Use a method such as TOVA(budget=1024), and pass the other one as prompt"
            raise wrong("decode", problem, remedy, InvalidTypeError)
        if "rotation" in self.decode.needs:
            problem = f"{self.decode!r} moves positions, but the kept positions have gaps"
            raise wrong("decode", problem, "Set positions='original' in this method")
        self._require_prompt_fits(self.prompt.most_tokens, self.decode.max_decode_tokens)

    def _require_prompt_fits(self, most: int | None, room: int | None) -> None:
        """Check that the tokens that `prompt` keeps fit into the budget of `decode`.

        Args:
            most: the most tokens that `prompt` keeps, None if unknown.
            room: the most tokens that `decode` holds, None if heads hold different numbers.

        Raises:
            InvalidArgumentError: they do not fit, or one of the numbers is None.
        """
        if room is None:
            problem = f"the heads of {self.decode!r} keep different numbers of tokens"
            raise wrong("decode", problem, "Use this method alone")
        if most is None:
            expected = (
                f"the same budget for all heads, because {self.decode.name} needs this"
                if self.prompt.per_head_budget
                else f"a budget in tokens of at most {room}, which {self.decode.name} can keep"
            )
            problem = f"expected a method with {expected}, but got {self.prompt!r}"
            raise wrong("prompt", problem, f"For example, use SnapKV(budget={room})")
        if most > room:
            kept = f"{self.prompt.name} may keep {most} tokens of the prompt"
            problem = f"{kept}, but {self.decode.name} can only keep {room} tokens"
            raise wrong("decode", problem, f"Use a budget of at least {most} for decode")

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

    def require_fit(self, layer: PromptLayer) -> None:
        self.prompt.require_fit(layer)

    def select(self, layer: PromptLayer) -> Selection:
        """Select positions with `prompt`, and compute the initial scores with `decode`.

        The scores are those of all tokens of the prompt, including dropped ones.

        Returns:
            The selection of `prompt`, or all positions if that is None, with the scores of
            `decode`.

        Raises:
            InvalidArgumentError: `prompt` returned no valid selection, or cannot hold what must be
                kept.
            BudgetTooSmallError: a budget of `prompt` in bytes cannot hold the window and the sinks.
        """
        own = _with_queries(layer, self.prompt.query_tokens)
        selection = checks.select(self.prompt, own, [layer.layer_idx])
        if selection is None:
            selection = Selection.keep_all(layer)
        heads = max(layer.num_kv_heads, selection.keep_indices.shape[1])
        if heads != layer.num_kv_heads:  # tokens will be stored per query head
            layer = replace(layer, stored_heads=heads)
        scores = self.decode.note(_with_queries(layer, self.decode.query_tokens))
        return replace(selection, scores=scores)

    def votes_at_stake(self, layer: PromptLayer) -> VotesAtStake | None:
        return self.prompt.votes_at_stake(_with_queries(layer, self.prompt.query_tokens))

    def evict(self, step: DecodeStep) -> Eviction:
        return self.decode.evict(step)


def _with_queries(layer: PromptLayer, query_tokens: int) -> PromptLayer:
    """Return the layer with only its last `query_tokens` queries.

    It is the layer itself if it has no more than that.
    """
    start = max(0, layer.queries.shape[2] - query_tokens)
    return replace(layer, queries=layer.queries[:, :, start:]) if start else layer


def _named(value: object) -> str:
    return value.name if isinstance(value, Policy) else repr(value)
