"""RULER (Hsieh et al. 2024): thirteen tasks of one length each, generated here.

Everything that is drawn is drawn anew for every sample, from the seed, the task, the length and the
sample's number. Texts, counts, answer lengths and scores are those of the official suite, its later
correction of "assgined" in vt included. Some other versions differ, and their numbers with them: in
lm-eval 0.4.13 the worked example of cwe never reaches the prompt, vt keeps the misspelling, and a
question with several accepted answers scores their mean instead of the best one.

Three things are not the official suite's. A haystack grows in the smallest steps there are, not by
500 words or 10 documents. Where a length has no room for all documents that HotpotQA gives to a
question, distractors go first, and a question whose own documents do not fit is passed over; the
official generator does not end there. And fwe keeps to the length with its answer, as all others.
Where a chat template is applied, the answer's start stands directly behind it, without a space.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least, require_each_at_least
from snapkv_lab.evaluate.fitting import fitted
from snapkv_lab.evaluate.haystack import HaystackTask
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.tasks.ruler.counting import CommonWords, FrequentWords
from snapkv_lab.evaluate.tasks.ruler.needle import Needles
from snapkv_lab.evaluate.tasks.ruler.puzzle import Generator, Wanted
from snapkv_lab.evaluate.tasks.ruler.qa import Answering
from snapkv_lab.evaluate.tasks.ruler.tracing import Tracing

GENERATORS: dict[str, Generator] = {
    "niah_single_1": Needles(haystack="noise"),
    "niah_single_2": Needles(haystack="essay"),
    "niah_single_3": Needles(haystack="essay", value="uuids"),
    "niah_multikey_1": Needles(haystack="essay", keys=4),
    "niah_multikey_2": Needles(haystack="needles"),
    "niah_multikey_3": Needles(haystack="needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles(haystack="essay", values=4),
    "niah_multiquery": Needles(haystack="essay", queries=4),
    "vt": Tracing(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": Answering(dataset="squad"),
    "qa_2": Answering(dataset="hotpotqa"),
}
"""The tasks by their official names, in the official order."""

_PATIENCE = 20


@dataclass(frozen=True, kw_only=True)
class Ruler(HaystackTask):
    """The thirteen tasks of RULER: needles, variables, common words and real questions.

    Args:
        tasks: which of the thirteen.
        lengths: tokens of prompt and answer together, never more; officially 4k to 128k.
        samples_each: samples of every task and length; officially 500.
        seed: of everything that is drawn.
    """

    name: ClassVar[str] = "ruler"
    metric: ClassVar[str] = "string match"
    axes: ClassVar[tuple[str, ...]] = ("task", "length")

    tasks: tuple[str, ...] = tuple(GENERATORS)
    lengths: tuple[int, ...] = (4096,)
    samples_each: int = 100
    haystack: str | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the settings."""
        require_at_least("samples_each", self.samples_each, 1)
        require_each_at_least("lengths", self.lengths, 1)
        unknown = [task for task in self.tasks if task not in GENERATORS]
        if unknown or not self.tasks:
            raise InvalidArgumentError(
                f"tasks: expected some of {', '.join(GENERATORS)}, got "
                f"{', '.join(unknown) or 'none'}; name those to run, or leave it out for all"
            )

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Samples of every length and task."""
        essay = tuple(self.text.text.split())
        for length, task in itertools.product(self.lengths, self.tasks):
            yield from self._cell(tokenizer, task, length, essay)

    def score(self, sample: Sample, prediction: str) -> float:
        """The fraction of references that are in the answer; of questions, whether any is."""
        said = prediction.lower()
        found = [reference.lower() in said for reference in sample.references]
        if GENERATORS[str(sample.cell["task"])].any_reference:
            return float(any(found))
        return sum(found) / len(found)

    def _cell(
        self, tokenizer: Any, task: str, length: int, essay: tuple[str, ...]
    ) -> Iterator[Sample]:
        """The samples of one task and length; those that cannot fit are passed over."""
        generator, hint, made = GENERATORS[task], None, 0
        for index in itertools.count():
            name = f"{task}/{length}/{index}"
            wanted = Wanted(length=length, index=index, seed=f"{self.seed}/{name}", essay=essay)
            found = fitted(
                partial(_sample, task, name, wanted),
                tokenizer,
                length,
                least=generator.least,
                most=generator.most,
                hint=hint,
            )
            if found is not None:
                sample, hint = found
                yield sample
                made += 1
                if made == self.samples_each:
                    return
            elif index + 1 - made > _PATIENCE + made:
                raise InvalidArgumentError(
                    f"lengths: expected room for a sample of {task}, got {length} tokens; pass a "
                    "larger length, or leave the task out"
                )


def _sample(task: str, name: str, wanted: Wanted, parts: int) -> Sample:
    generator = GENERATORS[task]
    puzzle = generator.puzzle(wanted, parts)
    return Sample(
        name=name,
        cell={"task": task, "length": wanted.length},
        context=puzzle.context,
        question=puzzle.question,
        answer_start=puzzle.answer_start,
        references=puzzle.references,
        settings=GenerationSettings(max_new_tokens=generator.new_tokens),
    )
