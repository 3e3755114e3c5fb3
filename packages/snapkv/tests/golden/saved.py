"""Files that earlier releases saved, and the tokens that the loaded caches must generate."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from snapkv import Document
from tests.golden import golden, record
from tests.golden.cases import POLICIES, TURNS, Case
from tests.golden.models import drawn_ids, golden_model
from tests.golden.play import PROMPT, Stage, Talk, asked, load
from tests.golden.record import Record

FOLDER = Path(__file__).parent / "saved"
EXPECTED = FOLDER / "expected.json.xz"
_PLAIN = Case(model="least")
KINDS = {
    "dense": _PLAIN,
    "per-query-head": replace(_PLAIN, policy="snapkv-none"),
    "ragged": replace(_PLAIN, policy="adakv"),
    "recall": replace(_PLAIN, turns="recall"),
    "sinks": replace(_PLAIN, policy="streaming-llm"),
    "sums": replace(_PLAIN, policy="h2o"),
    "counts": replace(_PLAIN, policy="scissorhands"),
    "strategies": replace(_PLAIN, policy="fastgen"),
    "latent": Case(model="deepseek"),
    "sliding": Case(model="gemma3"),
    "document": replace(_PLAIN, turns="recall", then="document"),
}


@torch.no_grad()
def write() -> None:
    """Write all files and expected results again; the test checks that old files load."""
    FOLDER.mkdir(exist_ok=True)
    for kind, case in KINDS.items():
        path = FOLDER / f"{kind}.safetensors"
        if case.then == "document":
            ids, policy = drawn_ids(1, PROMPT // 2, 1), POLICIES[case.policy]()
            Document(golden_model(case.model), ids, policy, **TURNS[case.turns]).save(path)
            continue
        with tempfile.TemporaryDirectory() as folder:
            talk = Talk(golden_model(case.model), case, Path(folder))
            talk.ask(PROMPT // 2, 1)
            talk.answer("answer", 4)
            talk.ask(6, 2)
            talk.answer("second answer", 3)
            talk.cache.save(path, beside={"ids": talk.ids, "mask": talk.mask})
    record.write({"arithmetic": record.arithmetic(), "cases": _expected()}, EXPECTED)


def _expected() -> Record:
    found = {kind: record.noted(loaded(kind)) for kind in KINDS}
    for kind, seen in found.items():
        if "error" in seen:
            raise RuntimeError(f"{kind}: expected a file that is loaded, but got {seen['error']}")
        seen |= {"hold": len(seen["stages"]), "close": golden.closeness(KINDS[kind])}
    return found


@torch.no_grad()
def loaded(kind: str) -> Iterator[Stage]:
    """Load a saved cache, continue with it, and yield its stages."""
    case, path = KINDS[kind], FOLDER / f"{kind}.safetensors"
    model = golden_model(case.model)
    if case.then == "document":
        document = Document.load(path, model)
        for tokens in (7, 4):
            yield asked(model, document, f"{tokens} tokens asked", [drawn_ids(1, tokens, 1)[0]])
        return
    talk = Talk(model, case, FOLDER)
    talk.cache, beside = load(path, model, case)
    talk.ids, talk.mask = beside["ids"], beside["mask"]
    yield talk.stage("loaded", torch.empty(1, 0), torch.zeros(1, 1))
    yield talk.feed("text", 3, 2)
    talk.ask(6, 3)
    yield talk.answer("answer", 4)
