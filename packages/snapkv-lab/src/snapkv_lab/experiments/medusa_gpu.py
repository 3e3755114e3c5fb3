"""Figure 9 on a 7B shape: what a step costs, with and without heads, on full and small caches.

Weights are random, so no head can guess right: how many guesses are accepted is set, not measured,
to `ACCEPTED` of the likeliest tree, and every row says so. What is measured is the time of a step:
the heads, the tree's forward pass and moving what was accepted.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv.decoding import CandidateTree, Medusa, MedusaHeads
from snapkv.policies import Policy
from snapkv_lab.experiments.medusa import Clock
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.timing import alternate, ratios, spread

ACCEPTED = (0.75, 0.55, 0.4, 0.3)
"""How often a candidate of each depth is accepted where the one above it was; an assumption, which
comes to 2.4 tokens a step."""


class SetMedusa(Medusa):
    """Accepts as many candidates as a draw says, right or wrong."""

    def __init__(self, heads: MedusaHeads, tree: CandidateTree) -> None:
        super().__init__(heads, tree)
        self._draw = torch.Generator().manual_seed(0)

    def accept(
        self, tree: CandidateTree, tokens: Tensor, logits: Tensor, *, samples: bool
    ) -> list[int]:
        """The first path, as far as the draw goes."""
        super().accept(tree, tokens, logits, samples=samples)  # its time counts
        path = [node for node in tree.paths[0].tolist() if node >= 0]
        draws = torch.rand(len(path) - 1, generator=self._draw)
        stays = (draws < torch.tensor(ACCEPTED[: len(path) - 1])).long()
        return path[: 1 + int(stays.cumprod(dim=0).sum())]


def figure_9(
    model: Any, *, lengths: tuple[int, ...], budget: int, tokens: int, rounds: int
) -> Iterator[Row]:
    """Rows of plain decoding and Medusa, each on the full cache and on SnapKV's.

    Args:
        model: of any shape, weights random.
        lengths: prompt tokens.
        budget: of SnapKV.
        tokens: generated in every round.
        rounds: that count.
    """
    heads = MedusaHeads.untrained(model, len(ACCEPTED)).to(model.dtype)
    tree = CandidateTree.likeliest(heads.accuracies, 63)
    caches: dict[str, Policy] = {"full cache": FullCache(), f"snapkv@{budget}": SnapKV(budget)}
    for length in lengths:
        ids = torch.randint(3, model.config.vocab_size, (1, length), device=model.device)
        acceptance: dict[str, float] = {}

        def run(
            name: str, policy: Policy, medusa: Medusa | None, ids: Tensor, found: dict[str, float]
        ) -> float:
            clock = Clock()
            model.generate(
                ids,
                past_key_values=CompressedCache(model, policy),
                custom_generate=medusa,
                streamer=clock,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
            found[name] = 1.0 if medusa is None else medusa.tally.acceptance_length
            return clock.ms_per_token()

        contenders = {
            f"{way}, {cache}": (policy, medusa)
            for cache, policy in caches.items()
            for way, medusa in (("plain", None), ("Medusa", SetMedusa(heads, tree)))
        }
        times = alternate(
            {
                name: lambda name=name, one=one, ids=ids, found=acceptance: run(
                    name, *one, ids, found
                )
                for name, one in contenders.items()
            },
            rounds=rounds,
            warmup_rounds=1,
        )
        for name, ms in times.items():
            yield {
                "bench": "medusa",
                "contender": name,
                "length": length,
                "budget": budget,
                "tokens": tokens,
                "ms_per_token": spread(ms, 3),
                "faster_than_plain": spread(ratios(times["plain, full cache"], ms), 3),
                "faster_than_medusa": spread(ratios(times["Medusa, full cache"], ms), 3),
                "acceptance_length": round(acceptance[name], 3),
                "acceptance": "set, not measured",
            }
