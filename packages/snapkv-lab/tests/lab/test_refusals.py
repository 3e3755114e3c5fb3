"""Bad settings and files are refused in one line with the reason, before anything is answered."""

import gzip
import json
from dataclasses import replace

import pytest

from snapkv import H2O, KVzip, MissingDependencyError, SnapKV, SnapKVError
from snapkv_lab import drawing
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.harness import CompressedLM
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.store import Store
from snapkv_lab.evaluate.tasks import (
    Instructions,
    Lines,
    LongBench,
    Needle,
    RagCitation,
    RagPipeline,
    RagPosition,
    Ruler,
    Turns,
)
from snapkv_lab.medusa.training import train_heads
from snapkv_lab.medusa_training import MedusaTraining
from snapkv_lab.report import figures
from snapkv_lab.study import FitGate, HitRate, Overlap, Sensitivity
from snapkv_lab.study import Instructions as Compared
from tests.lab.evaluate.test_harness import requests
from tests.lab.evaluate.test_longbench import row as longbench_row
from tests.lab.evaluate.test_rag import document, line
from tests.lab.evaluate.tiny import METHODS, Keys

SNAPKV = Method(label="s", policy=SnapKV(48))
RETRIEVAL = "passage_retrieval_en"
THREE = longbench_row(RETRIEVAL, answers=["3"])
SMALL = Turns(cloze=True, lengths=(200,), questions=2, samples_each=1)


def run(task, *methods, **options):
    """Run a task that must be refused before its folder is made."""

    def refused(tiny, folder):
        try:
            Run(loaded=tiny, task=task, methods=methods, **options).evaluate(folder / "results")
        finally:
            assert not (folder / "results").exists()

    return refused


def made(kind, **settings):
    return lambda tiny, folder: kind(**settings)


def samples(task):
    return lambda tiny, folder: list(task.samples(tiny.tokenizer))


def data(kind, name, *lines, **settings):
    """Make a task read a user's file with these lines: rows, text or bytes."""

    def refused(tiny, folder):
        texts = (line if isinstance(line, str | bytes) else json.dumps(line) for line in lines)
        coded = [text if isinstance(text, bytes) else text.encode() for text in texts]
        (folder / name).write_bytes(b"\n".join(coded))
        place = folder / (name if kind is RagPosition or name.endswith(".zip") else "")
        samples(kind(data=str(place), **settings))(tiny, folder)

    return refused


def study(of, words=None):
    """Run a study of the haystack, or of a document with `words` words."""

    def refused(tiny, folder):
        (folder / "note.txt").write_text("word " * (words or 0))
        documents = (str(folder / "note.txt"),) if words else ()
        replace(of, documents=documents).measure(tiny, folder / "out")

    return refused


def harness(kind, *given):
    def refused(tiny, folder):
        with Store(folder, {}) as store:
            getattr(CompressedLM(tiny, SNAPKV, store), kind)(requests(kind, *given))

    return refused


def heads_of_little_text(tiny, folder):
    train_heads(tiny, ["a b c " * 9], folder, MedusaTraining(passage_tokens=8), lambda *_: None)


REFUSED = [
    # Tasks.
    (made(Needle, depths=102), "depths: expected at most 101"),
    (
        made(Needle, variant="fork"),
        "variant: expected one of magic-number, sandwich, but got 'fork'",
    ),
    (made(Instructions, lengths=(100,)), "lengths"),
    (made(Needle, lengths=(1000, 1500.5, 2000)), "lengths: expected an integer"),
    (made(LongBench, datasets=("hotpot",)), "got 'hotpot'.* Did you mean hotpotqa"),
    (made(LongBench, code_similarity="jaro"), "code_similarity: expected one of difflib"),
    (made(RagPipeline, documents=(10, 30), retrieve=20), "retrieve: .* 30 documents, but got 20"),
    (made(Ruler, tasks=("niah",)), r"tasks: expected some of .*, but got niah\. Use some"),
    (samples(Needle(lengths=(300,), depths=1, digits=99)), "lengths: there is no space for a text"),
    (
        samples(Lines(lengths=(200,), examples=3)),
        "large enough for the question, the answer and 4 lines",
    ),
    (samples(Ruler(tasks=("cwe",), lengths=(150,))), "the length is too small for a sample of cwe"),
    (
        samples(Ruler(tasks=("qa_1",), lengths=(150,))),
        "the length is too small for a sample of qa_1",
    ),
    (
        samples(RagCitation(corpus="squad", documents=(50_000,), samples_each=1)),
        r"expected at most \d+, as many as there are",
    ),
    (
        samples(RagCitation(corpus="squad", documents=(5,), samples_each=10**6)),
        r"expected at most \d+, .* got 1000000\. For example, use --samples-each",
    ),
    (
        data(LongBench, "qasper.jsonl", longbench_row("qasper"), "{broken", datasets=("qasper",)),
        r"a JSON object in .*qasper\.jsonl, line 2, but got '{broken'\. Get the archive again",
    ),
    (
        data(LongBench, RETRIEVAL + ".jsonl", THREE, datasets=(RETRIEVAL,)),
        r'answers to be texts like "Paragraph 3" in .*, line 1',
    ),
    (
        data(LongBench, "lcc.jsonl", datasets=("lcc",), extended=True),
        r"expected the file lcc_e\.jsonl in .*, but got no such file",
    ),
    (data(LongBench, "data.zip", "no archive", datasets=("lcc",)), "Download the file again"),
    (data(LongBench, "lcc.jsonl", "", datasets=("lcc",)), "expected rows in"),
    (
        data(RagPosition, "a.jsonl", line(), "{"),
        r"a JSON object in .*a\.jsonl, line 2, but got '\{'",
    ),
    (
        data(RagPosition, "a.jsonl", line(answers=["Ann", "!"])),
        "answers to be a list of texts with words in them",
    ),
    (
        data(RagPosition, "a.jsonl", line(), line(ctxs=[document("A")])),
        r"a document with isgold in the ctxs of .*a\.jsonl, line 2",
    ),
    (
        data(RagPosition, "a.jsonl", line(ctxs=[document("A", isgold="yes")])),
        r"ctxs\[0\]\.isgold to be true or false in .*a\.jsonl, line 1",
    ),
    (data(RagPosition, "a.jsonl", b"\xff\xfe"), r"JSON lines in UTF-8.*a\.jsonl"),
    (
        data(RagPosition, "a.jsonl.gz", gzip.compress(b"{}" * 1000, mtime=0)[:20]),
        r"a \.gz of one, but got .*a\.jsonl\.gz",
    ),
    # Runs.
    (run(Keys(), *METHODS[:1] * 2), "policy: expected at least one .*once, but got full, full"),
    (
        run(Keys(), Method(label="k", policy=KVzip(48))),
        "second reading of the text. .* --setting hidden",
    ),
    (run(Keys(sentences=()), SNAPKV), "samples: there are no samples with these settings"),
    (
        run(Keys(sentences=(8, 8)), SNAPKV),
        "samples: expected every sample once, but got 8/0 2 times",
    ),
    (run(SMALL, Method(label="h", policy=H2O(48), later="compress")), "evicts after every token"),
    (
        run(
            SMALL,
            Method(label="r", policy=KVzip(48), later="recall"),
            questions=("hidden",),
            template="none",
        ),
        "policy: with recall, later turns are read once, but kvzip .* Use SnapKV",
    ),
    # lm-eval.
    (harness("loglikelihood", ("The key is un", "der")), "tasks: the tokenizer .* 'der' after"),
    (
        harness("generate_until", ("One", {"num_beams": 4})),
        "of a task, but got num_beams",
    ),
    (
        harness("generate_until", ("One", {"max_gen_toks": 2}), ("One", {"max_gen_toks": 900})),
        "a prompt with its answer needs 901",
    ),
    # Studies.
    (made(HitRate, questions=("",)), "question: expected at least one"),
    (made(HitRate, threshold=1.0), "threshold: expected attention between 0 and 1"),
    (made(HitRate, keep_ratio=0.001), "keep_ratio: 0.001 .* no more than sink_tokens=4"),
    (made(HitRate, kernel_size=4), "kernel_size: the value must be an odd number"),
    (made(Overlap, document_tokens=2560), "keep_ratio: .* of the 0 positions"),
    (made(Compared, keep_ratio=1.5), "keep_ratio: 1.5 is not .* of 3,072"),
    (made(Sensitivity, windows=()), "windows: expected a value of at least 1"),
    (made(HitRate, document_tokens=5), "document_tokens: expected a value of at least 128"),
    (made(FitGate, texts=3), "texts"),
    (study(HitRate(), words=9), r"document_tokens=3,072 .*note\.txt"),
    (study(Overlap(), words=600), "keep_ratio: .* of the 0 positions"),
    # Heads, figures.
    (heads_of_little_text, r"passages of 8 tokens, but got \d"),
    (made(MedusaTraining, answers=9), "answers"),
    (made(MedusaTraining, num_heads=0), "num_heads"),
    (made(MedusaTraining, learning_rate=2), "learning_rate"),
    (made(MedusaTraining, epochs=0), "epochs"),
    (lambda *_: drawing.require_drawable("a.png.txt"), r"ends in \.png, \.svg, \.pdf, but got"),
    (lambda *_: drawing.require_drawable(".png"), r"ends in \.png, \.svg, \.pdf, but got"),
    (lambda *_: figures.draw_bench([]), "plot: there are no rows to draw"),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED, ids=[said[:30] for _, said in REFUSED])
def test_invalid_settings_are_refused_in_one_line(refused, message, tiny, tmp_path):
    with pytest.raises(SnapKVError, match=message) as caught:
        refused(tiny, tmp_path)
    assert "\n" not in str(caught.value)


def test_figure_without_matplotlib_is_refused_early(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'matplotlib"):
        drawing.require_drawable("a.svg")
