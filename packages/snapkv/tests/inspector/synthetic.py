"""A record of any size without a model, as the page reads it."""

import torch

from snapkv.inspector.packing import packed_bits, packed_numbers, packed_scores
from snapkv.inspector.words import word_changes

FULL = "nine"

WORDS = (
    "the",
    " gate",
    " opens",
    " at",
    " nine",
    ".",
    "\n",
    " <b>",
    " key",
    " &amp;",
    "\t",
    " 钥匙",
)


def answer(text):
    return {
        "text": text,
        "finish_reason": "stop",
        "same": text == FULL,
        "changes": [list(change) for change in word_changes(FULL, text)],
        "prompt_tokens": 100,
        "new_tokens": 4,
        "first_token_ms": 1234.0,
        "token_ms": 56.0,
        "kept_tokens": 64,
        "held_bytes": 3 * 2**20,
        "full_bytes": 2**30,
    }


def method(label, tokens, layers, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    bin_tokens = -(-tokens * layers * heads // (4 * 2**20))
    made = []
    for layer in range(layers):
        votes = torch.rand(heads, tokens - 32, generator=generator) ** 8
        scores = torch.nn.functional.max_pool1d(votes[None], 7, 1, 3)[0]
        kept = torch.zeros(heads, tokens, dtype=torch.bool)
        kept[:, -32:] = True
        kept.scatter_(1, scores.topk(min(992, tokens // 4), dim=-1).indices, True)
        made.append(
            {
                "layer": layer,
                "kept_tokens": kept.sum(dim=-1).tolist(),
                "bits": packed_bits(kept),
                "votes": packed_scores(votes, bin_tokens),
                "scores": packed_scores(scores, bin_tokens),
                "cuts": [200.0] * heads,
                "logarithmic": True,
            }
        )
    return {
        "label": label,
        "policy": {"name": label, "budget": 1024},
        "sentence": f"The answer needs § 9.11; {label} kept all of it.",
        "kept": {"share": 1.0, "heads": 2.0, "of_heads": layers * heads},
        "heat": heat(votes, scores, kept, layers - 1, heads - 1),
        "answer": answer(f"{label} says <i>nine</i>"),
        "layers": made,
        "bin_tokens": bin_tokens,
    }


def heat(votes, scores, kept, layer, head):
    """Of the last layer and head: the votes once more in each of eight rows, fading."""
    rows = votes[head] * torch.arange(1, 9)[:, None] / 8
    bin_tokens = -(-rows.numel() // 2**18)
    order = scores[head].argsort(descending=True, stable=True)
    return {
        "layer": layer,
        "head": head,
        "share": 0.34,
        "rows": len(rows),
        "bin_tokens": bin_tokens,
        "weights": packed_scores(rows, bin_tokens, one_scale=True),
        "order": packed_numbers(order[: 2**14]),
        "prefix_tokens": len(order),
        "best_tokens": int(kept[head, : len(order)].sum()),
    }


def point(budget, text, likelihood):
    held = budget * 2**15
    return answer(text) | {"budget": budget, "likelihood": likelihood, "held_bytes": held}


def record(tokens, *, layers=2, heads=3, labels=("snapkv",), pieces=None, question="When?"):
    texts = [WORDS[i * 7 % len(WORDS)] for i in range(tokens)] if pieces is None else pieces
    third = len(texts) // 3
    return {
        "pieces": texts,
        "full": answer(FULL),
        "methods": [method(n, len(texts), layers, heads, i) for i, n in enumerate(labels)],
        "spans": [
            {"start": 4, "stop": third, "loss": 0.01, "changed": False, "place": "§ 1"},
            {
                "start": third,
                "stop": third + 16,
                "loss": 2.5,
                "changed": True,
                "place": "§ 9.11",
            },
        ],
        "curve": [point(64, "ten", 0.2), point(128, FULL, 0.8), point(512, FULL, None)],
        "full_likelihood": 0.9,
        "checked_answer": FULL,
        "other_layers": 0,
        "growing_share": 1.0,
        "request": {"documents": ["notes.txt"], "question": question, "model": {"name": "demo"}},
    }
