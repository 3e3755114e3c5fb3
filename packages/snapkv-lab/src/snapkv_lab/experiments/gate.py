"""Paragraphs compressed before their question is known, read once by a gate or another method.

Questions of SQuAD, each over the paragraph that answers it and three others of its article, those
that the full cache answers right. The right answer is fed to the model behind the compressed
paragraphs and the question: it counts where each of its tokens is the likeliest. The gate was
fitted to texts of other kinds (`snapkv study fit-gate`).
"""

import sys
from collections.abc import Iterator, Mapping

from snapkv import AdaKV, FullCache
from snapkv.app.observing import RecordedPrompt
from snapkv.policies import (
    Compactor,
    ExpectedAttention,
    KeyDiff,
    KVzap,
    KVzip,
    Policy,
    PrefixPolicy,
    SnapKV,
)
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.library import PREFIX, squad_questions
from snapkv_lab.experiments.pages import Pivot, Table
from snapkv_lab.experiments.prompts import encode, read_prompt, read_prompt_twice
from snapkv_lab.experiments.records import Row, grouped
from snapkv_lab.experiments.texts import Case, counted, scored

WINDOW_SIZE = 16
ONCE, TWICE, WEIGHED = "once", "twice", "twice, weighed"


def contenders(budget: int) -> Iterator[tuple[str, str, Policy]]:
    """A name, how the text is read, and a method."""
    own = {"budget": budget, "window_size": WINDOW_SIZE}
    made: list[tuple[str, PrefixPolicy, bool]] = [
        (TWICE, KVzip(**own), True),
        (WEIGHED, KVzip(plus=True, **own), True),
        (ONCE, KVzap(**own), True),
        (ONCE, Compactor(**own), True),
        (ONCE, ExpectedAttention(**own), False),
        (ONCE, KeyDiff(**own), False),
        (ONCE, SnapKV(**own), False),
    ]
    for read, policy, by_head in made:
        name = type(policy).__name__ + ("+" if read == WEIGHED else "")
        yield name, read, policy
        if by_head:
            yield f"AdaKV({name})", read, AdaKV(policy)


def _measure(given: Given) -> Iterator[Row]:
    loaded, known = given.loaded, 0
    for number, asked in enumerate(squad_questions(given.questions)):
        ids = encode(loaded.tokenizer, PREFIX + "".join(asked.documents))
        answer = encode(loaded.tokenizer, asked.answer)
        case = Case(
            group="squad",
            between_ids=encode(loaded.tokenizer, asked.question),
            answer_ids=answer,
            parts=[range(len(answer))],
        )
        once = read_prompt(loaded.model, ids, recorded_queries=len(ids))
        full = scored(once, once.compressed(FullCache()), case)
        if not full["right"][0]:
            continue
        known += 1
        print(f"question {known} of {given.right}, {len(ids)} tokens", file=sys.stderr)
        told = {"question": number, "prompt_tokens": len(ids)}
        yield told | {"method": "full cache", "share": None, "kept": None, **full}
        prompts = {ONCE: once} | {
            read: read_prompt_twice(loaded.model, loaded.tokenizer, ids, KVzip(plus=plus))
            for read, plus in ((TWICE, False), (WEIGHED, True))
        }
        yield from _answers(given, prompts, case, told)
        if known == given.right:
            return


def _answers(
    given: Given, prompts: Mapping[str, RecordedPrompt], case: Case, told: Row
) -> Iterator[Row]:
    for share in given.shares:
        for name, read, policy in contenders(round(told["prompt_tokens"] / share)):
            prompt, known = prompts[read], given.loaded.completed(policy)
            cache = prompt.compressed(known)
            kept = cache.report().held_bytes / cache.report().full_bytes
            found = scored(prompt, cache, case)
            yield told | {"method": name, "share": share, "kept": round(kept, 4)} | found


def _summed(rows: list[Row]) -> Iterator[Row]:
    """A line for each method and share; the full cache at every share."""
    for (method, share), own in grouped(rows, lambda row: (row["method"], row["share"])).items():
        right = counted(row["right"][0] for row in own)
        for each in (2, 4, 8) if share is None else (share,):
            yield {"method": method, "share": each, "right": str(right)}


GATE = Experiment(
    name="gate",
    title="Paragraphs compressed before their question is known",
    measure=_measure,
    options={
        "questions": Sized(60, 3),
        "right": Sized(12, 1),
        "shares": Sized((2, 4, 8), (4,)),
    },
    tables=(
        Table(
            Pivot("method", "{method}", "1/{share}", "{right}"),
            "Right answers, of those of the full cache",
            made=_summed,
        ),
    ),
)
