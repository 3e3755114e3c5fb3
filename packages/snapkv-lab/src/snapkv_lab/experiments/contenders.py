"""The methods that are compared with each other, all with the same number of slots to fill."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from snapkv import FullCache
from snapkv.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    Compactor,
    CriticalKV,
    ExpectedAttention,
    FastGen,
    KeyDiff,
    KVzip,
    LagKV,
    Policy,
    PrefixPolicy,
    PromptLayer,
    PromptThenDecode,
    PyramidKV,
    Random,
    Scissorhands,
    SnapKV,
    StreamingLLM,
)

WINDOW_SIZE = 16
"""Of every method that has a window: the best width for this model at small budgets."""

FULL = "full cache"
BUDGETLESS = ("FastGen",)

RECOVERY = {
    (768, 64): 0.001,
    (768, 192): 0.085,
    (768, 384): 0.82,
    (2048, 128): 0.001,
    (2048, 512): 0.08,
    (2048, 1024): 0.81,
}
"""FastGen's, by prompt length and budget: of steps of 0.005 those by which it held bytes nearest to
the budget's, on the first two documents. With less than 0.001 it holds no less."""


def contenders_at(budget: int) -> dict[str, Policy]:
    """Every method by its name in the table, at `budget` tokens per layer and KV head on average.

    Methods inside others are SnapKV with the paper's pooling. Scissorhands drops one token at a
    time, where the paper drops half of the cache: so it holds its budget at every step.
    """
    snapkv = SnapKV(budget, window_size=WINDOW_SIZE, kernel_size=7)
    return {
        "SnapKV, kernel 7": snapkv,
        "SnapKV, kernel 13": SnapKV(budget, window_size=WINDOW_SIZE, kernel_size=13),
        "PyramidKV": PyramidKV(budget, window_size=WINDOW_SIZE, kernel_size=7),
        "AdaKV(SnapKV)": AdaKV(snapkv),
        "CriticalKV(SnapKV)": CriticalKV(snapkv),
        "ExpectedAttention": ExpectedAttention(budget, window_size=WINDOW_SIZE),
        "KeyDiff": KeyDiff(budget, window_size=WINDOW_SIZE),
        "H2O": H2O(budget),
        "TOVA": TOVA(budget),
        "Scissorhands": Scissorhands(budget, drop=1),
        "StreamingLLM": StreamingLLM(budget),
        "StreamingLLM, original positions": StreamingLLM(budget, positions="original"),
        "SnapKV, then TOVA": PromptThenDecode(prompt=snapkv, decode=TOVA(budget)),
        "Random": Random(budget, window_size=WINDOW_SIZE),
    }


def read_twice_at(budget: int) -> dict[str, Policy]:
    """Methods that read the text a second time, before the question is known."""
    kvzip = KVzip(budget, window_size=WINDOW_SIZE)
    return {"KVzip": kvzip, "AdaKV(KVzip)": AdaKV(kvzip)}


def rkv_at(budget: int) -> dict[str, Policy]:
    """R-KV, which also evicts one token at a time here, where its authors' evicts 128."""
    return {"R-KV": RKV(budget, window_size=WINDOW_SIZE, evict_every=1)}


def questionless_at(budget: int) -> dict[str, Policy]:
    """Methods that choose without a question, and without a second reading."""
    return {
        "LagKV": LagKV(budget, window_size=WINDOW_SIZE),
        "LagKV, lag 32": LagKV(budget, window_size=WINDOW_SIZE, lag_size=32),
        "Compactor": Compactor(budget, window_size=WINDOW_SIZE),
    }


def around_wide_pooling(budget: int) -> dict[str, Policy]:
    """SnapKV with the wide kernel, and what is built on SnapKV around that one."""
    wide = SnapKV(budget, window_size=WINDOW_SIZE, kernel_size=13)
    return {
        "SnapKV": wide,
        "PyramidKV": PyramidKV(budget, window_size=WINDOW_SIZE, kernel_size=13),
        "AdaKV(SnapKV)": AdaKV(wide),
        "CriticalKV(SnapKV)": CriticalKV(wide),
    }


def without_budget(prompt_tokens: int, budget: int, tokenizer: Any) -> dict[str, Policy]:
    """Methods that keep what they find necessary, with what brings them nearest to the budget."""
    fastgen = FastGen(RECOVERY[prompt_tokens, budget])
    return {"FastGen": fastgen.with_tokenizer(tokenizer)}


def full_cache() -> dict[str, Policy]:
    """What they are all compared with."""
    return {FULL: FullCache()}


@dataclass(frozen=True)
class SinksAndRecent(PrefixPolicy):
    """Keeps the first `sink_tokens` of the prompt and fills the budget with the most recent.

    Only the selection is StreamingLLM's: positions stay true here, where StreamingLLM counts them
    inside its cache, and the tokens generated after the prompt are all kept.
    """

    name: ClassVar[str] = "sinks_and_recent"

    _: KW_ONLY
    sink_tokens: int = 4

    @property
    def query_tokens(self) -> int:
        """None: nothing is scored by attention."""
        return 0

    def score(self, layer: PromptLayer) -> Tensor:
        """Later is better: (B, Hkv, P) float32."""
        batch, heads, prompt_tokens, _ = layer.keys.shape
        columns = torch.arange(prompt_tokens - self.window_size, device=layer.keys.device)
        return columns.float().expand(batch, heads, -1)
