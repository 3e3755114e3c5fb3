"""A page of any size without a model."""

import torch

from snapkv.page import Page, Shown, Stop
from snapkv.page.packing import Ballot
from snapkv.page.words import answer_sentence, kept_sentence, word_changes

FULL = "nine"

WORDS = (
    "the", " gate", " opens", " at", " nine", ".", "\n", " <b>", " key", " &amp;", "\t", " 钥匙",
)  # fmt: skip
VOTERS, WINDOW, SINKS, HEADS = 24, 16, 4, 90


def stop(label, tokens, budget, text, generator):
    counts = (torch.rand(tokens, generator=generator) ** 3 * (HEADS + 1)).long()
    counts[:SINKS] = counts[-WINDOW:] = HEADS
    held = budget * 2**15
    return Stop(
        label=label,
        sentences=(
            kept_sentence(budget, tokens, 0, held, 2**30),
            answer_sentence(text == FULL, None),
        ),
        counts=counts,
        heads=HEADS,
        answer={"text": text, "same": text == FULL, "changes": word_changes(FULL, text)},
    )


def method(label, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    votes = torch.rand(VOTERS, tokens, generator=generator) ** 8
    votes[:, -WINDOW:] = 0
    made = ((64, "ten"), (128, FULL), (512, f"{label} says <i>nine</i>"))
    return Shown(
        label=label,
        stops=[stop(str(n), tokens, n, text, generator) for n, text in made],
        chosen=1,
        ballot=Ballot(votes=votes, sink_tokens=SINKS, window_tokens=WINDOW),
        unvoted="this method counts no votes",
    )


def page(tokens, *, labels=("snapkv",), pieces=None, question="When?", title="What was kept"):
    texts = [WORDS[i * 7 % len(WORDS)] for i in range(tokens)] if pieces is None else pieces
    return Page(
        title=title,
        question=question,
        pieces=texts,
        methods=[method(label, len(texts), seed) for seed, label in enumerate(labels)],
        full=FULL,
        request={"documents": ["notes.txt"], "model": {"name": "demo"}},
    )
