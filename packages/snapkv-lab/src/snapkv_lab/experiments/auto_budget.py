"""The budget that the votes choose, against fixed ones, and how often its words were right.

Texts of 1k to 4k tokens of kinds that chose neither; every way generates an answer, which is right
if it has the expected words. A row is a question. Rounds 0 to 3 of the texts set the bound on what
bits may move the output, so what is stored begins with the next.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from snapkv import AutoBudget, CompressedCache, SnapKV, default_policy
from snapkv.app.observing import RecordedPrompt
from snapkv.cli.notes import LostVotes
from snapkv.policies import FullCache, Policy
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.held_out import held_out
from snapkv_lab.experiments.pages import Pivot, Table
from snapkv_lab.experiments.records import Row, grouped
from snapkv_lab.experiments.texts import ReadText, Text, counted


class _UndilutedBudget(AutoBudget):
    """The same bound however long the prompt is."""

    def voted(self, shares: Tensor) -> Tensor:
        return (shares > self.lost_vote).sum(dim=-1)


WAYS: dict[str, tuple[Callable[[], Policy], Any]] = {
    "default, as it came": (lambda: default_policy(AutoBudget()), None),
    "the same, undiluted": (lambda: default_policy(_UndilutedBudget()), None),
    "1/4 of the tokens": (lambda: default_policy(keep_ratio=1 / 4), None),
    "1/4, the paper's": (lambda: SnapKV(keep_ratio=1 / 4), None),
    "1/4 of the bytes": (lambda: default_policy("25%"), "auto"),
    "1/8 of the bytes": (lambda: default_policy("12.5%"), "auto"),
    "1/16 of the bytes": (lambda: default_policy("6.25%"), "auto"),
}
"""As it came: not in fewer bits. Undiluted: one bound for prompts of every length."""


@dataclass(frozen=True)
class Answering:
    """What is generated greedily behind a prompt, and whether it has the expected words."""

    tokenizer: Any
    prompt: RecordedPrompt
    expected: str

    def answered(self, cache: CompressedCache, ids: list[int]) -> Row:
        """What is generated on a cache, beside what is on the full one, and whether it is right."""
        answer = self.tokenizer.decode(self._as_generated(cache, ids))
        right = self.expected in answer
        return {"right": right, "answer": None if right else answer}

    def generated(self, cache: CompressedCache, most: int = 28) -> list[int]:
        """Tokens until the words are there, at most so many."""
        token, ids = self.prompt.last_logits[0, -1].argmax(), list[int]()
        while len(ids) < most and int(token) != self.tokenizer.eos_token_id:
            ids.append(int(token))
            if self.expected in self.tokenizer.decode(ids):
                break
            logits = self.prompt.model(token[None, None], past_key_values=cache).logits
            token = logits[0, -1].argmax()
        return ids

    def _as_generated(self, cache: CompressedCache, answer: list[int]) -> list[int]:
        """The answer of the full cache, if that is what is generated, else what is."""
        if len(answer) > 1:
            fed = torch.tensor([answer[:-1]])
            logits = self.prompt.model(fed, past_key_values=cache).logits
            if logits[0].argmax(dim=-1).tolist() == answer[1:]:
                return answer
            cache.crop(-fed.shape[1])
        return self.generated(cache, len(answer) + 6)


@torch.inference_mode()
def _measure(given: Given, text: Text) -> Iterator[Row]:
    """How every way answers each question that the full cache answers right."""
    tokenizer, read = given.loaded.tokenizer, ReadText(given.loaded.model, text.ids)
    for asked in text.cases:
        prompt = read.asked(asked.ids)
        answering = Answering(tokenizer, prompt, asked.expected)
        ids = answering.generated(prompt.compressed(FullCache()))
        known = asked.expected in tokenizer.decode(ids)
        yield {
            "text": text.name,
            "kind": text.name.partition("/")[0],
            "tokens": prompt.prompt_tokens,
            "expected": asked.expected,
            "full": known,
            "answers": [_answer(answering, ids, way) for way in WAYS] if known else [],
        }


def _answer(answering: Answering, ids: list[int], way: str) -> Row:
    """An answer, and what `snapkv ask` says of its cache."""
    policy, bits = WAYS[way]
    cache = answering.prompt.compressed(policy(), quantize=bits)
    report = cache.report()
    lost = LostVotes.of(report)
    return {
        "way": way,
        **answering.answered(cache, ids),
        "kept": round(report.kept_tokens, 1),
        "bytes": round(report.held_bytes / report.full_bytes, 5),
        "word": lost.word,
        "lost": lost.share,
        "peak": lost.peak,
    }


def _answers(rows: Sequence[Row]) -> list[Row]:
    """Every answer, with its text's kind and length, and the share of the tokens that was kept."""
    return [
        found
        | {
            "kind": row["kind"],
            "length": int(row["text"].split("/")[1]),
            "share": found["kept"] / row["tokens"],
        }
        for row in rows
        for found in row.get("answers", ())
    ]


def _right(rows: Sequence[Row]) -> str:
    return str(counted(row["right"] for row in rows))


def _by_length(rows: list[Row]) -> Iterator[Row]:
    """Of every way the means of its sizes, and what is right, of all and by the texts' length."""
    for way, own in grouped(_answers(rows), "way").items():
        sizes = (fmean(row[key] for row in own) for key in ("share", "bytes"))
        yield {"way": way, "of": "tokens, bytes", "cell": "{:.0%}, {:.0%}".format(*sizes)}
        yield {"way": way, "of": "right", "cell": _right(own)}
        for length, some in sorted(grouped(own, "length").items()):
            yield {"way": way, "of": f"{length:,} tokens", "cell": _right(some)}


def _by_kind(rows: list[Row]) -> Iterator[Row]:
    for (way, kind), own in grouped(_answers(rows), lambda row: (row["way"], row["kind"])).items():
        yield {"way": way, "kind": kind, "right": _right(own)}


WORDS = ("safe", "doubtful", "lost")
_FAMILIES = {"all": "", "default": "default", "given bytes": "bytes", "the paper's": "paper"}
"""Of ways, by what their names have in them."""


def _by_word(rows: list[Row]) -> Iterator[Row]:
    words = grouped(_answers(rows), "word")
    for word in WORDS:
        for family, part in _FAMILIES.items():
            own = [row for row in words.get(word, ()) if part in row["way"]]
            yield {"word": word, "family": family, "right": _right(own)}


def _wrong(rows: list[Row]) -> Iterator[Row]:
    """What was called safe and is wrong."""
    for row in rows:
        for found in row.get("answers", ()):
            if found["word"] == WORDS[0] and not found["right"]:
                yield row | found


AUTO_BUDGET = Experiment(
    name="auto_budget",
    title="The budget that the votes choose, and how often its words were right",
    takes="two hours",
    measure=_measure,
    cases=lambda given, _: held_out(given.loaded.tokenizer, range(given.first, given.rounds)),
    options={"first": Sized(4, 0), "rounds": Sized(8, 1)},
    tables=[
        Table(
            Pivot("way", "{way}", "{of}", "{cell}"),
            "Right answers, of those that the full cache has right",
            made=_by_length,
        ),
        Table(Pivot("way", "{way}", "{kind}", "{right}"), "Right answers by kind", made=_by_kind),
        Table(
            Pivot("word", "{word}", "{family}", "{right}"),
            "The word for the lost votes, and whether the answer was right",
            made=_by_word,
        ),
        Table(
            {
                "text": "{text}",
                "way": "{way}",
                "expected": "{expected}",
                "answer": lambda row: f"`{' '.join(row['answer'].split())}`",
            },
            "Called safe, and wrong",
            made=_wrong,
        ),
    ],
)
