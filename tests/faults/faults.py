"""The seeded faults: which text of the source becomes which, and which tests must notice."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One wrong line.

    Attributes:
        name: what is wrong.
        file: below the `src` of its package.
        old: text that stands once in the file.
        new: what is put in its place.
        tests: arguments of pytest; at least one test of these must fail.
        vllm: whether those need vLLM.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    vllm: bool = False


OPS = ("packages/snapkv/tests/ops",)
FAULTS = (
    Fault(
        name="of equal votes the higher position wins",
        file="snapkv/ops/votes/top_k.py",
        old="(tied.cumsum(dim=-1) <= room)",
        new="(tied.flip(-1).cumsum(dim=-1).flip(-1) <= room)",
        tests=(
            "packages/snapkv/tests/policies/test_selection_contract.py",
            "packages/snapkv/tests/ops",
        ),
    ),
    Fault(
        name="of equal votes the higher position wins, where rows keep different numbers",
        file="snapkv/ops/votes/top_k.py",
        old="torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :most]",
        new="torch.sort(scores.flip(-1), dim=-1, descending=True, stable=True)"
        ".indices[..., :most].neg().add(scores.shape[-1] - 1)",
        tests=(
            "packages/snapkv/tests/policies/test_selection_contract.py",
            "packages/snapkv/tests/ops",
        ),
    ),
    Fault(
        name="one pad of a row can win",
        file="snapkv/ops/votes/top_k.py",
        old="scores.masked_fill(slots < pads, float",
        new="scores.masked_fill(slots < pads - 1, float",
        tests=(
            "packages/snapkv/tests/policies/test_selection_contract.py",
            "packages/snapkv/tests/ops",
        ),
    ),
    Fault(
        name="a query of the window does not see its own token",
        file="snapkv/ops/votes/reference.py",
        old="positions <= positions[prompt_tokens - window_tokens :, None]",
        new="positions < positions[prompt_tokens - window_tokens :, None]",
        tests=OPS,
    ),
    Fault(
        name="in blocks, a query of the window does not see its own token",
        file="snapkv/ops/votes/blocked.py",
        old="device=scores.device) > own",
        new="device=scores.device) >= own",
        tests=OPS,
    ),
    Fault(
        name="in blocks, the cap of scores is not scaled back",
        file="snapkv/ops/votes/blocked.py",
        old=".tanh_().mul_(softcap)",
        new=".tanh_()",
        tests=OPS,
    ),
    Fault(
        name="in blocks, a sink's share of the softmax is forgotten",
        file="snapkv/ops/votes/blocked.py",
        old="total + 1",
        new="total",
        tests=OPS,
    ),
    Fault(
        name="query heads vote for the KV head of another group",
        file="snapkv/ops/votes/reference.py",
        old="grouped = votes.view(B, num_kv_heads, Hq // num_kv_heads, P)",
        new="grouped = votes.view(B, Hq // num_kv_heads, num_kv_heads, P).transpose(1, 2)",
        tests=OPS,
    ),
    Fault(
        name="votes are pooled forward instead of backward",
        file="snapkv/ops/votes/reference.py",
        old="F.pad(votes, (behind, before), value=outside)",
        new="F.pad(votes, (before, behind), value=outside)",
        tests=OPS,
    ),
    Fault(
        name="a vote fades twice as fast",
        file="snapkv/ops/votes/reference.py",
        old="decay * last)",
        new="decay * decay * last)",
        tests=OPS,
    ),
    Fault(
        name="ragged heads are gathered from the KV head of another group",
        file="snapkv/storage/ragged.py",
        old="* keys.shape[1] // index.shape[1]",
        new="% keys.shape[1]",
        tests=(
            "packages/snapkv/tests/hf/test_combinations.py",
            "packages/snapkv/tests/policies/test_uneven.py",
        ),
    ),
    Fault(
        name="the first token of a ragged head is taken for none",
        file="snapkv/storage/ragged.py",
        old="from_end > counts[..., None]",
        new="from_end >= counts[..., None]",
        tests=("packages/snapkv/tests/policies/test_uneven.py", "packages/snapkv/tests/cache"),
    ),
    Fault(
        name="ragged rows keep the lengths of other rows",
        file="snapkv/storage/ragged.py",
        old="tuple(self.head_tokens[row] for row in rows.tolist())",
        new="tuple(self.head_tokens[row] for row in sorted(rows.tolist()))",
        tests=("packages/snapkv/tests/policies/test_uneven.py", "packages/snapkv/tests/sequences"),
    ),
    Fault(
        name="the last edge of ragged heads is read as a whole block",
        file="snapkv/ops/ragged/layout.py",
        old="(edges if offset or block == whole else blocks)",
        new="(edges if offset and block < whole else blocks)",
        tests=("packages/snapkv/tests/ops/test_ragged.py",),
    ),
    Fault(
        name="ragged attention lets a token see the next one",
        file="snapkv/ops/ragged/blocked.py",
        old="hidden.triu(tokens - queries + 1)",
        new="hidden.triu(tokens - queries + 2)",
        tests=("packages/snapkv/tests/ops/test_ragged.py",),
    ),
    Fault(
        name="a crop leaves the values of the tokens behind",
        file="snapkv/storage/base.py",
        old="        for plane in self.planes:\n"
        "            plane.states = plane.states[..., :-tokens, :]\n",
        new="        keys, values = self.planes\n"
        "        keys.states = keys.states[..., :-tokens, :]\n"
        "        values.states = values.states[..., tokens:, :]\n",
        tests=("packages/snapkv/tests/hf/test_cache.py", "packages/snapkv/tests/cache"),
    ),
    Fault(
        name="the append buffer writes over the last token that it handed out",
        file="snapkv/storage/append_buffer.py",
        old="first.as_strided(new.shape, strides, stored * D)",
        new="first.as_strided(new.shape, strides, (stored - 1) * D)",
        tests=("packages/snapkv/tests/storage/test_append_buffer.py",),
    ),
    Fault(
        name="static storage counts a crop as one token",
        file="snapkv/storage/static.py",
        old="self.filled.sub_(tokens)",
        new="self.filled.sub_(1)",
        tests=("packages/snapkv/tests/models/test_static.py",),
    ),
    Fault(
        name="codes are a step too fine",
        file="snapkv/ops/codes/coding.py",
        old="least.float()) / levels)",
        new="least.float()) / (levels + 1))",
        tests=("packages/snapkv/tests/ops/test_codes.py",),
    ),
    Fault(
        name="the two codes of a byte change places",
        file="snapkv/ops/codes/coding.py",
        old="low, high = numbers.unbind",
        new="high, low = numbers.unbind",
        tests=("packages/snapkv/tests/ops/test_codes.py",),
    ),
    Fault(
        name="tokens of an unfilled block of codes are attended to",
        file="snapkv/ops/codes/layout.py",
        old="return (slots >= tokens.view(-1, 1)).flatten()",
        new="return (slots > tokens.view(-1, 1)).flatten()",
        tests=("packages/snapkv/tests/ops/test_codes.py",),
    ),
    Fault(
        name="tokens that are encoded behind a prompt stand before it",
        file="snapkv/ops/codes/layout.py",
        old="BlockLayout((*self.sections, section)",
        new="BlockLayout((section, *self.sections)",
        tests=("packages/snapkv/tests/ops/test_codes.py",),
    ),
    Fault(
        name="offloaded tokens come back that were taken back",
        file="snapkv/storage/offload.py",
        old="end=min(piece.end, tokens)",
        new="end=piece.end",
        tests=(
            "packages/snapkv/tests/cache/test_crop.py",
            "packages/snapkv/tests/cache/test_recall.py",
        ),
    ),
    Fault(
        name="offloaded rows keep the pads of other rows",
        file="snapkv/storage/offload.py",
        old="rows=piece.rows[rows], shift=piece.shift[rows]",
        new="rows=piece.rows[rows]",
        tests=("packages/snapkv/tests/cache", "packages/snapkv/tests/hf"),
    ),
    Fault(
        name="drafts are judged by the token behind them",
        file="snapkv/decoding/tree.py",
        old="tokens[paths[:, 1:]] == chosen[paths[:, :-1]]",
        new="tokens[paths[:, 1:]] == chosen[paths[:, 1:]]",
        tests=("packages/snapkv/tests/decoding/test_acceptance.py",),
    ),
    Fault(
        name="a rejected draft may be drawn again",
        file="snapkv/decoding/tree.py",
        old="above = (rest - draft_probabilities[accepted]).clamp(min=0)",
        new="above = rest",
        tests=("packages/snapkv/tests/decoding/test_acceptance.py",),
    ),
    Fault(
        name="a candidate sees candidates that are no ancestors",
        file="snapkv/decoding/tree.py",
        old="seen[node] |= seen[parent]",
        new="seen[node] |= seen[: parent + 1].any(dim=0)",
        tests=("packages/snapkv/tests/decoding",),
    ),
    Fault(
        name="a saved file may have changed",
        file="snapkv/cache/saving/files.py",
        old="if _digest(file, start) != sealed:",
        new="if len(_digest(file, start)) != len(sealed):",
        tests=("packages/snapkv/tests/cache/test_saving.py",),
    ),
    Fault(
        name="sinks are turned from where they were turned to before",
        file="snapkv/storage/base.py",
        old="sinks = torch.where(were_moved, original, sinks)",
        new="sinks = torch.where(were_moved, sinks, sinks)",
        tests=(
            "packages/snapkv/tests/policies/test_sinks.py",
            "packages/snapkv/tests/policies/test_streaming.py",
        ),
    ),
    Fault(
        name="a prompt's last token counts as decoding",
        file="snapkv/hf/forward_context.py",
        old="seen_tokens - new_tokens >= prompt_end",
        new="seen_tokens - new_tokens >= prompt_end - 1",
        tests=("packages/snapkv/tests/hf",),
    ),
    Fault(
        name="a joined document's keys stand one position off",
        file="snapkv/library/joining.py",
        old="torch.full((1, 1), step,",
        new="torch.full((1, 1), step + 1,",
        tests=("packages/snapkv/tests/library/test_blending.py",),
    ),
    Fault(
        name="TOVA lets one head decide for all",
        file="snapkv/policies/tova.py",
        old="weights[:, :, -1].mean(dim=1, keepdim=True)",
        new="weights[:, :1, -1]",
        tests=("packages/snapkv/tests/policies",),
    ),
    Fault(
        name="H2O forgets what tokens received before",
        file="snapkv/policies/h2o.py",
        old="step.scores + self.rate(step)",
        new="self.rate(step)",
        tests=("packages/snapkv/tests/policies",),
    ),
    Fault(
        name="AdaKV shares out a token too few",
        file="snapkv/policies/budget.py",
        old="order[: total - sum(whole)]",
        new="order[: total - sum(whole) - 1]",
        tests=("packages/snapkv/tests/policies",),
    ),
    Fault(
        name="Layers share out a token too few",
        file="snapkv/policies/across_layers.py",
        old="even.sum(dim=-1).tolist()",
        new="(even.sum(dim=-1) - 1).tolist()",
        tests=("packages/snapkv/tests/policies/test_across_layers.py",),
    ),
    Fault(
        name="vLLM is told the slots of tokens that were dropped",
        file="snapkv_vllm/held.py",
        old="right=True",
        new="right=False",
        tests=("packages/snapkv-vllm/tests/serving/test_held.py",),
    ),
    Fault(
        name="vLLM's blocks: a request counts rounded room as dropped",
        file="snapkv_vllm/blocks.py",
        old="self.dropped_tokens[request_id] = order.seen_tokens - room",
        new="self.dropped_tokens[request_id] = order.dropped_tokens - 1",
        tests=(
            "packages/snapkv-vllm/tests/serving/vllm/test_accounting.py",
            "packages/snapkv-vllm/tests/serving/vllm/test_engine.py",
        ),
        vllm=True,
    ),
    Fault(
        name="what stands behind a dropped span has a position too low",
        file="snapkv/cache/slots.py",
        old="reached = torch.searchsorted(begins.contiguous(), places.flatten(1).contiguous(), "
        "right=True)",
        new="reached = torch.searchsorted(begins.contiguous(), places.flatten(1).contiguous())",
        tests=("packages/snapkv/tests/cache/test_spans.py",),
    ),
    Fault(
        name="a block of codes that has lost tokens keeps the wrong ones",
        file="snapkv/storage/coded.py",
        old="order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)",
        new="order = kept.to(torch.uint8).argsort(dim=1, stable=True)",
        tests=("packages/snapkv/tests/cache/test_spans.py",),
    ),
    Fault(
        name="queries of dropped tokens vote on the next turn",
        file="snapkv/cache/layer.py",
        old="self._note(last_queries=_queries_left(held, left, positions[:, 0]))",
        new="pass",
        tests=("packages/snapkv/tests/cache/test_spans.py",),
    ),
    Fault(
        name="vLLM's blocks: kept tokens are written into blocks that others share",
        file="snapkv_vllm/blocks.py",
        old="return bool(self.enable_caching) and",
        new="return not self.enable_caching and",
        tests=(
            "packages/snapkv-vllm/tests/serving/vllm/test_accounting.py",
            "packages/snapkv-vllm/tests/serving/vllm/test_engine.py",
        ),
        vllm=True,
    ),
    Fault(
        name="vLLM's rows: a resumed request goes on with what it held before",
        file="snapkv_vllm/runners.py",
        old="        *(scheduler_output.preempted_req_ids or ()),\n"
        "        *scheduler_output.scheduled_cached_reqs.resumed_req_ids,\n",
        new="",
        tests=(
            "packages/snapkv-vllm/tests/serving/vllm/test_scheduling.py",
            "packages/snapkv-vllm/tests/serving/vllm/test_engine.py",
        ),
        vllm=True,
    ),
    Fault(
        name="a state stays in its row where rows change places",
        file="snapkv/cache/hybrid.py",
        old="        LinearAttentionLayer.reorder_cache(self, beam_idx)\n",
        new="",
        tests=("packages/snapkv/tests/matrix/test_matrix.py",),
    ),
)
