"""Whether compression will help, in sentences."""

from collections.abc import Iterator

from snapkv.plan.planner import Plan
from snapkv.plan.weights import is_counted
from snapkv.validation import format_bytes

_WORTH_SAYING = 1.1
"""A speed-up below it is none."""


def verdict(plan: Plan) -> list[str]:
    """What a plan means for its user; the first sentence answers "will it help?"."""
    return [*_headline(plan), *_limits(plan), *_notes(plan)]


def _headline(plan: Plan) -> Iterator[str]:
    tokens, kept = plan.request.context_tokens, plan.kept_tokens
    if kept >= tokens:
        yield (
            f"Compression will not help: a prompt of {tokens:,} tokens is within the budget, and "
            "nothing is dropped."
        )
        return
    saved = plan.full.cache_bytes - plan.compressed.cache_bytes
    share = plan.full.cache_bytes / plan.full.step_bytes
    if plan.compressed.fits is False:
        yield "This does not fit the memory, whatever is kept and however it is read."
    elif plan.full.fits is False:
        yield "Compression is what makes this fit: the full cache does not."
    elif plan.decode_speedup < _WORTH_SAYING and saved < 0.1 * plan.full.total_bytes:
        yield (
            f"Compression will hardly help: the full cache is {share:.0%} of what a step reads, so "
            f"tokens come at most {plan.decode_speedup:.2f} times as fast, and "
            f"{format_bytes(saved)} are saved. A longer prompt or a larger batch would change that."
        )
    else:
        yield (
            f"Compression helps: {format_bytes(saved)} of cache are saved, and tokens come up to "
            f"{plan.decode_speedup:.1f} times as fast."
        )


def _limits(plan: Plan) -> Iterator[str]:
    tokens, positions = plan.request.context_tokens, plan.footprint.max_positions
    answer = plan.request.new_tokens
    if positions is not None and tokens + answer > positions:
        yield (
            f"The model has {positions:,} positions, fewer than {tokens:,} tokens of prompt and "
            f"{answer:,} of answer need: it will be refused. {_remedy(positions, answer)}"
        )
    if plan.compressed.fits and not plan.compressed.fits_in_one_pass:
        yield (
            "Read in one pass, the prompts do not fit; read them in pieces, with "
            "snapkv.prefill.layer_by_layer."
        )
    if plan.request_speedup < _WORTH_SAYING <= plan.decode_speedup:
        yield (
            f"Do not expect the whole request to be faster: reading the prompt, which stays as it "
            f"is, takes about {plan.prefill_share:.0%} of its time with an answer of {answer:,} "
            "tokens. Longer answers, or several from one prompt, gain more."
        )


def _remedy(positions: int, answer: int) -> str:
    if answer >= positions:
        return "Ask for a shorter answer."
    return f"Shorten the prompt to {positions - answer:,} tokens, or the answer."


def _notes(plan: Plan) -> Iterator[str]:
    model = plan.footprint
    if model.sliding_layers:
        yield (
            f"{len(model.sliding_layers)} of "
            f"{len(model.sliding_layers) + len(model.full_layers)} layers slide over a window and "
            "stay as they are."
        )
    if not is_counted(model.quantization):
        yield (
            f"The checkpoint's weights are quantized ({model.quantization}); they are counted in "
            f"{model.dtype}, which takes more."
        )
    if model.experts:
        yield (
            f"A token visits {model.experts_per_token} of {model.experts} experts per layer; the "
            "step is counted with those that the batch is expected to visit."
        )
