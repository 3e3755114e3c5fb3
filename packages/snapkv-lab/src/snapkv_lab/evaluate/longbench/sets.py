"""The English and code sets of LongBench: how each is asked and scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from snapkv.errors import InvalidArgumentError
from snapkv.validation import nearest
from snapkv_lab.evaluate import metrics
from snapkv_lab.evaluate.rouge import rouge_l


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One set of LongBench.

    Attributes:
        name: as its file is called.
        category: under which the paper's table lists it.
        metric: "F1", "ROUGE-L", "classification", "count", "retrieval" or "code similarity".
        max_new_tokens: where an answer is cut off.
        prompt_sha256: of the published prompt, with ``{context}`` and ``{input}`` in their places.
        chat: whether its prompt is wrapped in a chat template; few-shot and code prompts are not.
        first_line: whether only the answer's first line counts.
        extended: whether LongBench-E has it too.
    """

    name: str
    category: str
    metric: str
    max_new_tokens: int
    prompt_sha256: str
    chat: bool = True
    first_line: bool = False
    extended: bool = True

    def score(
        self,
        prediction: str,
        references: Sequence[str],
        classes: Sequence[str],
        code_similarity: metrics.CodeSimilarity,
    ) -> float:
        """The best score over the right answers, 0 to 1.

        Args:
            prediction: what was generated.
            references: right answers.
            classes: that there are; only classification needs them.
            code_similarity: see `metrics.code_similarity`.
        """
        said = metrics.first_line(prediction) if self.first_line else prediction
        measures: dict[str, metrics.Metric] = {
            "F1": metrics.qa_f1,
            "ROUGE-L": rouge_l,
            "count": metrics.count,
            "retrieval": metrics.retrieval,
            "classification": partial(metrics.classification, classes=classes),
            "code similarity": partial(metrics.code_similarity, backend=code_similarity),
        }
        return metrics.best(measures[self.metric], said, references)


_document = partial(DataSet, category="single-document QA", metric="F1")
_documents = partial(
    DataSet,
    category="multi-document QA",
    metric="F1",
    max_new_tokens=32,
    prompt_sha256="9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
)
_summary = partial(DataSet, category="summarization", metric="ROUGE-L", max_new_tokens=512)
_examples = partial(DataSet, category="few-shot learning", chat=False, first_line=True)
_synthetic = partial(DataSet, category="synthetic", max_new_tokens=32)
_code = partial(DataSet, category="code", metric="code similarity", max_new_tokens=64, chat=False)

_ALL = (
    _document(
        name="narrativeqa",
        max_new_tokens=128,
        prompt_sha256="aada7ed24b06abace5b0045ac3bcfe06fc831a6cf434f0ecfd99fb7b3d299e1c",
        extended=False,
    ),
    _document(
        name="qasper",
        max_new_tokens=128,
        prompt_sha256="0fbdd123fe7f83d6d6a9c583ca28cb29d68e523bf8fec01a0cf2dcd11037775d",
    ),
    _document(
        name="multifieldqa_en",
        max_new_tokens=64,
        prompt_sha256="20b4666a2de8a1f701bdb6c4e015fa9f8758d64b361d841f7766df6c9ceba770",
    ),
    _documents(name="hotpotqa"),
    _documents(name="2wikimqa"),
    _documents(name="musique", extended=False),
    _summary(
        name="gov_report",
        prompt_sha256="91c25d585b189ced91c9280efcb4ecb5dcff9548cd4e3bfae66c68025b569e95",
    ),
    _summary(
        name="qmsum",
        prompt_sha256="dca23b678fe0183bbd9555b57947022aed1b85739da5ad7e1b4708dd0c71c409",
        extended=False,
    ),
    _summary(
        name="multi_news",
        prompt_sha256="2af3f28c40b902e6535d4910510d51653613c49de9b2fc287c5958395061101d",
    ),
    _examples(
        name="trec",
        metric="classification",
        max_new_tokens=64,
        prompt_sha256="0eff8bebdba99d91e9d7d91b6ab39455ac74648bea92c9255c9f68c62175b2db",
    ),
    _examples(
        name="triviaqa",
        metric="F1",
        max_new_tokens=32,
        prompt_sha256="00a802e6377e72fca39b169cf6c28893bedf23ba7286b03ecd15867c3e27a7c4",
    ),
    _examples(
        name="samsum",
        metric="ROUGE-L",
        max_new_tokens=128,
        prompt_sha256="a68d884234907eefcaa0eacf7b2997f60fa46603988dceae6a44f9b49f045b3f",
    ),
    _synthetic(
        name="passage_count",
        metric="count",
        prompt_sha256="986550b6c61009c629a4535766d94b7b51e2b2b9e1ed169e4ecb54417466e964",
    ),
    _synthetic(
        name="passage_retrieval_en",
        metric="retrieval",
        prompt_sha256="39b96b7fa52bdd2aa2bde34ea199158505201b9a0a2c3ce94e80249293f60431",
    ),
    _code(
        name="lcc",
        prompt_sha256="6a1f24cf0bb83cd90f1fca8f0dd24801626c2aaea29db834ddc83b950e71190e",
    ),
    _code(
        name="repobench-p",
        prompt_sha256="ee9ec182ea5ffeb70a7140d55baea97264a8612d88226d323afa90859c36240c",
    ),
)

SETS: dict[str, DataSet] = {data_set.name: data_set for data_set in _ALL}
"""The 16 English and code sets by name, in the order of the paper's table."""


def chosen_sets(names: Sequence[str], *, extended: bool) -> list[DataSet]:
    """The sets of those names in the table's order; all that there are for no names.

    Raises:
        InvalidArgumentError: an unknown name, or one that LongBench-E lacks.
    """
    known = {name: one for name, one in SETS.items() if one.extended or not extended}
    for name in names:
        if name not in known:
            which = "LongBench-E" if extended else "LongBench"
            raise InvalidArgumentError(
                f"datasets: expected English or code sets of {which}, got {name!r}"
                f"{nearest(name, known) or '; there are ' + ', '.join(known)}"
            )
    return [one for name, one in known.items() if name in names or not names]
