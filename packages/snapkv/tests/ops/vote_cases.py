"""Cases for votes: states of odd shapes, and checks for every implementation of each step."""

import itertools
import sys

import torch

from snapkv.ops import (
    AttentionStates,
    Fading,
    ScoreOptions,
    fade_votes,
    largest_votes,
    reduce_group,
    window_votes,
)

SHAPES = {  # B, Hq, Hkv, W, T, D
    "gqa-63": (2, 4, 2, 8, 63, 16),
    "mha-d80": (2, 3, 3, 16, 100, 80),
    "mqa-d96": (1, 8, 1, 5, 129, 96),
    "gqa-d256": (1, 4, 2, 33, 70, 256),
    "several splits": (2, 4, 2, 32, 600, 64),
    "window 1": (1, 2, 1, 1, 40, 128),
    "no prefix": (1, 2, 2, 8, 8, 16),
    "one of prefix": (2, 2, 2, 8, 9, 20),
}
EXTRAS = ("", "softcap", "sinks", "pads", "all")
REDUCES = ("none", "mean", "max", "sum")
LENGTHS = (0, 1, 2, 3, 63, 1000, 1023, 1024, 1025, 2100)
DECAYS = (1e-300, 1e-30, 0.5, 0.9, 0.999, 1 - 1e-9)
TIMES_THE_REFERENCES_ERROR = 4.0


def states(shape, dtype=torch.float32, device="cpu"):
    """Queries and keys, the keys a slice of longer ones, as they are where drafts follow."""
    B, Hq, Hkv, W, T, D = shape
    generator = torch.Generator().manual_seed(T)
    queries = torch.randn(B, Hq, W, D, generator=generator).mul_(2)
    keys = torch.randn(B, Hkv, T + 3, D, generator=generator)
    return queries.to(device, dtype), keys.to(device, dtype)[:, :, :T]


def options_of(shape, extras, device="cpu"):
    """Return the other fields of `AttentionStates`; a padded second row is nearly all padding."""
    B, Hq, _, _, T, D = shape
    scores = {"scaling": D**-0.5}
    if extras in ("softcap", "all"):
        scores["softcap"] = 5.0
    if extras in ("sinks", "all"):
        scores["sink_logits"] = torch.linspace(-1, 2, Hq, device=device)
    options = {"score_options": ScoreOptions(**scores)}
    if extras in ("pads", "all"):
        options["pad_tokens"] = torch.arange(B, device=device) * (T - 3)
    return options


def exact(queries, keys, score_options, *, pad_tokens=None, group_reduce):
    """The vote in float64, row by row and head by head."""
    (B, Hq, W, _), (Hkv, T) = queries.shape, keys.shape[1:3]
    softcap, sink_logits = score_options.softcap, score_options.sink_logits
    votes = torch.zeros(B, Hq, T - W, dtype=torch.float64, device=keys.device)
    for row, head, query in itertools.product(range(B), range(Hq), range(W)):
        first, stop = 0 if pad_tokens is None else int(pad_tokens[row]), T - W + query + 1
        if first >= stop:
            continue
        seen = keys[row, head // (Hq // Hkv), first:stop].double()
        scores = seen @ queries[row, head, query].double() * score_options.scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sink_logits is not None:
            scores = torch.cat([scores, sink_logits[head].double()[None]])
        weights = scores.softmax(dim=0)[: stop - first]
        votes[row, head, first:] += weights[: max(0, T - W - first)]
    return reduce_group(votes, Hkv, group_reduce)


def require_votes(
    impl, dtype, device="cpu", *, shapes=tuple(SHAPES), kinds=EXTRAS, reduces=REDUCES
):
    """Against float64 no more error than a small multiple of the reference's own.

    Or of float32's rounding: a score is rounded by its own size, and so the weight that it is the
    exponent of by as many times its own.
    """
    for name, extras, how in itertools.product(shapes, kinds, reduces):
        shape = SHAPES[name]
        queries, keys = states(shape, dtype, device)
        options = options_of(shape, extras, device) | {"group_reduce": how}
        if "pad_tokens" in options:  # reading a pad anywhere must poison nothing
            for row, pads in enumerate(options["pad_tokens"].tolist()):
                keys[row, :, :pads] = float("nan")
        expected = exact(queries.nan_to_num(), keys.nan_to_num(), **options)
        how_reduced = {"group_reduce": options.pop("group_reduce")}
        clean = AttentionStates(queries, keys.nan_to_num(), **options)
        reference = window_votes(clean, impl="reference", **how_reduced)
        got = window_votes(AttentionStates(queries, keys, **options), impl=impl, **how_reduced)
        assert got.dtype == torch.float32
        assert got.shape == reference.shape
        if not got.numel():
            continue
        own = (reference.double() - expected).abs().max()
        error = (got.double() - expected).abs().max()
        largest = options["score_options"].softcap or 1.0
        rounding = torch.finfo(torch.float32).eps * max(1.0, largest) * expected.max()
        allowed = TIMES_THE_REFERENCES_ERROR * torch.maximum(own, rounding)
        case = f"{impl}, {dtype}, {name}, {extras or 'plain'}, {how}"
        assert error <= allowed, f"{case}: {error:.2e}, the reference {own:.2e}"


def some_votes(tokens, device="cpu"):
    """(2, 3, tokens): as votes are, few of them high; with pads; below zero, and equal ones."""
    generator = torch.Generator().manual_seed(tokens)
    votes = torch.rand(2, 3, tokens, generator=generator).pow_(8)
    votes[1, :, : tokens // 2] = 0.0
    votes[0, 1].neg_()
    votes[0, 2].mul_(4).ceil_()
    return votes.to(device)


def require_fading(impl, device="cpu", *, lengths=LENGTHS, decays=DECAYS):
    """Against float64 no further than the rounding of as many factors."""
    for tokens, decay in itertools.product(lengths, decays):
        votes = some_votes(tokens, device)
        expected = votes.double()
        for place in range(1, tokens):
            carried = decay * expected[..., place - 1]
            expected[..., place] = expected[..., place].maximum(carried)
        got = fade_votes(votes, decay, impl=impl)
        assert got.dtype == torch.float32
        assert got.shape == votes.shape
        if tokens:
            error = (got.double() - expected).abs().max()
            rounding = torch.finfo(torch.float32).eps * expected.abs().max()
            steps = min(tokens, 100 / (1 - decay))  # what is further away is lost anyway
            assert error <= steps * rounding + 1e-36, f"{impl}, {tokens}, {decay}: {error:.2e}"


def require_largest(impl, dtype, device="cpu", *, cases):
    """Against the reference in float32, of the same states: no further than rounding."""
    for name, extras, how, decay, (more, sinks) in cases:
        shape = SHAPES[name]
        queries, keys = states(shape, dtype, device)
        scoring = options_of(shape, extras, device)
        options = {
            "group_reduce": how,
            "lift": Fading(decay),
            "prefix_tokens": shape[4] - shape[3] + min(more, shape[3]),
            "sink_tokens": sinks,
        }
        wide = AttentionStates(queries.float(), keys.float(), **scoring)
        expected = largest_votes(wide, impl="reference", **options)
        for row, pads in enumerate(scoring.get("pad_tokens", torch.tensor([])).tolist()):
            keys[row, :, :pads] = float("nan")
        got = largest_votes(AttentionStates(queries, keys, **scoring), impl=impl, **options)
        case = f"{impl}, {dtype}, {name}, {extras or 'plain'}, {how}, {decay}, {more}, {sinks}"
        near = {"rtol": 1e-4, "atol": 1e-6 * shape[3], "msg": lambda said, at=case: f"{at}: {said}"}
        torch.testing.assert_close(got, expected, **near)


FADED_CASES = [
    ("gqa-63", "all", "mean", 0.8, (3, 4)),
    ("mqa-d96", "", "max", 0.999, (0, 0)),
    ("several splits", "pads", "max", 0.935, (0, 4)),
    ("several splits", "all", "none", 1e-300, (40, 4)),
    ("window 1", "sinks", "sum", 0.935, (0, 70)),
]


def require_unlike_numbers(impl, device="cpu"):
    """A score that is no number is none in what it touches: a maximum must not lose it."""
    queries, keys = states(SHAPES["several splits"], device=device)
    keys[0, 1, 300] = float("nan")
    options = {"lift": Fading(0.9), "prefix_tokens": 568, "group_reduce": "max"}
    given = AttentionStates(queries, keys, ScoreOptions(scaling=0.1))
    for votes in largest_votes(given, impl=impl, **options):
        assert votes[0, 1].isnan().any()
        assert votes[[0, 1, 1], [0, 0, 1]].isfinite().all()


if __name__ == "__main__":
    kernel = sys.argv[1]
    require_votes(kernel, torch.float32, reduces=("none", "mean"))
    require_votes(kernel, torch.float32, shapes=("gqa-63",))
    # The interpreter multiplies no bfloat16 matrices.
    in_float16 = ("gqa-63", "mqa-d96", "several splits")
    require_votes(kernel, torch.float16, shapes=in_float16, reduces=("mean",))
    of_shapes = ("mha-d80", "no prefix", "one of prefix")
    for_shapes = [(name, "all", "max", 0.9, (2, 1)) for name in of_shapes]
    require_largest(kernel, torch.float32, cases=FADED_CASES[:1] + for_shapes)
    wide = ("gqa-d256", "all", "max", 0.9, (2, 1))
    require_largest(kernel, torch.float16, cases=[*FADED_CASES, wide])
    require_unlike_numbers(kernel)
    require_fading(kernel, lengths=(0, 1, 63), decays=(1e-300, 0.5, 0.9))  # in Python, each vote
    require_fading(kernel, lengths=(1025,), decays=(0.999,))
