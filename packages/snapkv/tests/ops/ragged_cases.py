"""Cases for ragged attention: heads of odd lengths, and checks for every implementation."""

import math
import sys
from dataclasses import fields, replace

import torch

from snapkv.ops import RaggedLayout, ScoreOptions, TailInputs, ragged_attention
from snapkv.ops.ragged import flash

LENGTHS = {
    "tiny": ((5, 2), (0, 7)),
    "nothing kept": ((0, 0), (0, 0)),
    "whole blocks": ((64, 128), (64, 64)),
    "one past a block": ((65, 63), (1, 129)),
    "very uneven": ((1000, 3), (0, 40)),
}
QUERIES = (1, 3, 40)
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "both": {"softcap": 1.5, "sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def states(lengths, queries, *, tail=None, dim=20, dim_v=6, device="cpu", dtype=torch.float32):
    """Arguments of `ragged_attention` by name, for 2 rows, 2 KV heads and 4 query heads."""
    generator = torch.Generator().manual_seed(sum(map(sum, lengths)) + queries)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    N, S = sum(map(sum, lengths)), queries + 5 if tail is None else tail
    return {
        "queries": random(2, 4, queries, dim),
        "keys": random(N, dim),
        "values": random(N, dim_v),
        "layout": RaggedLayout(lengths, torch.device(device)),
        "tail_keys": random(2, 2, S, dim),
        "tail_values": random(2, 2, S, dim_v),
        "score_options": ScoreOptions(scaling=dim**-0.5),
    }


def with_options(arguments, options, device="cpu"):
    """The arguments with what is in `OPTIONS`."""
    options = {k: v.to(device) if k == "sink_logits" else v for k, v in options.items()}
    return arguments | {"score_options": replace(arguments["score_options"], **options)}


def eager(arguments):
    """As a model's eager attention in the dtype of the states: scores, float32 softmax, mix."""
    queries, layout = arguments["queries"], arguments["layout"]
    Q, outputs, start = queries.shape[2], [], 0
    for row, counts in enumerate(layout.head_tokens):
        for head, count in enumerate(counts):
            stop = start + count
            keys = torch.cat([arguments["keys"][start:stop], arguments["tail_keys"][row, head]])
            values = torch.cat(
                [arguments["values"][start:stop], arguments["tail_values"][row, head]]
            )
            start = stop
            for member in (2 * head, 2 * head + 1):
                scores = queries[row, member] @ keys.T * arguments["score_options"].scaling
                ahead = torch.ones_like(scores, dtype=torch.bool).triu(len(keys) - Q + 1)
                weights = scores.masked_fill(ahead, -math.inf).softmax(
                    dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)
                )
                outputs.append(weights.to(values.dtype) @ values)
    return torch.stack(outputs).view(2, 4, Q, -1)


def wide(arguments):
    """The same in float64."""
    return {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def with_room(arguments):
    """The same with a tail that has room for seven more, other numbers behind what is written."""
    written = arguments["tail_keys"]
    tail = {
        name: torch.nn.functional.pad(arguments[name], (0, 0, 0, 7), value=100)
        for name in ("tail_keys", "tail_values")
    }
    tail["tail_tokens"] = torch.tensor(written.shape[2], device=written.device)
    return arguments | tail


def attended(attend, arguments, **options):
    """Call `attend` with `arguments`, those of `TailInputs` in one record."""
    names = {field.name for field in fields(TailInputs)}
    inputs = TailInputs(**{name: arguments[name] for name in names & arguments.keys()})
    others = {name: value for name, value in arguments.items() if name not in names}
    return attend(inputs, **others, **options)


def runs(impl, given):
    """Whether an implementation takes such arguments; all but one take any."""
    if impl != "flash":
        return True
    kept = {name: given[name] for name in given if name != "keys"}
    return attended(flash.obstacle, kept) is None


def require_reference(impl, device="cpu", *, cases=tuple(LENGTHS), query_counts=QUERIES):
    """The cases of an implementation against the reference."""
    for lengths in map(LENGTHS.get, cases):
        for queries in query_counts:
            dim_v = 20 if impl == "flash" else 6
            arguments = states(lengths, queries, device=device, dim_v=dim_v)
            for options in OPTIONS.values():
                given = with_options(arguments, options, device)
                if not runs(impl, given):
                    continue
                expected = attended(ragged_attention, given, impl="reference")
                for stored in (given, with_room(given)):
                    got = attended(ragged_attention, stored, impl=impl)
                    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def require_no_more_error_than_eager(impl, dtype, device="cpu"):
    """In low precision at most twice the error of eager attention, against float64."""
    for name in ("very uneven", "one past a block"):
        arguments = states(LENGTHS[name], 3, dim=64, dim_v=64, device=device, dtype=dtype)
        if not runs(impl, arguments):
            continue
        exact = eager(wide(arguments))
        error = (attended(ragged_attention, arguments, impl=impl).double() - exact).abs().max()
        allowed = (eager(arguments).double() - exact).abs().max()
        assert error <= 2 * allowed, f"{impl}, {name}: {error:.2e}, eager {allowed:.2e}"


if __name__ == "__main__":
    require_reference(sys.argv[1], cases=("one past a block",), query_counts=(3,))
    require_reference(sys.argv[1], cases=("tiny", "nothing kept"), query_counts=(1,))
