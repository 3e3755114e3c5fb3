"""A record of any size without a model, as the page reads it."""

import torch

from snapkv.lab.inspect.packing import packed_bits, packed_scores

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
        "answer": answer(f"{label} says <i>nine</i>"),
        "layers": made,
        "bin_tokens": bin_tokens,
    }


def record(tokens, *, layers=2, heads=3, labels=("snapkv",), pieces=None, question="When?"):
    texts = [WORDS[i * 7 % len(WORDS)] for i in range(tokens)] if pieces is None else pieces
    third = len(texts) // 3
    return {
        "pieces": texts,
        "full": answer("nine"),
        "methods": [method(n, len(texts), layers, heads, i) for i, n in enumerate(labels)],
        "spans": [
            {"start": 4, "stop": third, "loss": 0.01, "changed": False},
            {"start": third, "stop": third + 16, "loss": 2.5, "changed": True},
        ],
        "checked_answer": "nine",
        "other_layers": 0,
        "request": {"documents": ["notes.txt"], "question": question, "model": {"name": "demo"}},
    }
