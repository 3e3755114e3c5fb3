"""A limit on the bytes of a library: the least recently used documents are evicted."""

import random
import re
import time
from types import SimpleNamespace

import pytest
import torch

from snapkv import LibraryError
from snapkv.errors import InvalidArgumentError
from snapkv_app import Library
from snapkv_app.library.bound import SizeLimit
from snapkv_app.library.folder import Folder
from snapkv_app.library.index import DocumentEntry
from tests.library.conftest import TEXTS

TICK = 0.012
"""Seconds; a record's time is the file system's, which is coarse."""


def text_of(name, words):
    return f"The {name} says {'nothing ' * words}more."


class Shelf:
    """What is to be there: documents from the one asked for longest ago to the last."""

    def __init__(self):
        self.sizes, self.times, self.asked, self.clock = {}, {}, set(), 0

    def use(self, name, *, asked):
        self.clock += 1
        if asked:
            self.asked.add(name)
        if asked or name not in self.asked:
            self.times[name] = self.clock

    def forget(self, name):
        del self.sizes[name], self.times[name]
        self.asked.discard(name)

    def fit(self, bound, stay=()):
        """Forget the oldest until all fit; returns them, or None where they must stay."""
        kept = set(stay) | set(sorted(self.asked, key=self.times.__getitem__)[-1:])
        gone, total = [], sum(self.sizes.values())
        for name in sorted(self.sizes.keys() - kept, key=self.times.__getitem__):
            if total > bound:
                gone.append(name)
                total -= self.sizes[name]
        if total > bound:
            return None
        for name in gone:
            self.forget(name)
        return gone


def there(library):
    return {record.name: record.bytes for record in library.documents}


@pytest.mark.parametrize("seed", range(2))
def test_any_sequence_keeps_the_documents_used_last(tmp_path, tiny, seed):
    draw, library, wanted = random.Random(seed), Library(tmp_path / "l"), Shelf()
    library.add(tiny.model, tiny.tokenizer, [("first", text_of("first", 5))])
    (size,) = there(library).values()
    wanted.sizes["first"] = size
    wanted.use("first", asked=False)
    bound = 4 * size
    library.limit(bound)
    for step in range(12):
        what = draw.choice(["add", "add", "ask", "limit"])
        if what == "add":
            names = [f"d{step}", *draw.sample(sorted(wanted.sizes), min(1, len(wanted.sizes)))]
            texts = {name: text_of(name, draw.randrange(30)) for name in names}
            outcomes = library.add(
                tiny.model, tiny.tokenizer, texts.items(), on_progress=lambda *_: time.sleep(TICK)
            )
            gone = []
            for name, outcome in zip(names, outcomes, strict=False):
                before = wanted.sizes.get(name)
                wanted.sizes[name] = outcome.bytes or bound + 1
                wanted.times.setdefault(name, 0)
                fitted = wanted.fit(bound, names)
                assert (outcome.what == "failed") == (fitted is None)
                if fitted is not None:
                    gone += fitted
                    wanted.use(name, asked=False)
                elif before is None:
                    wanted.forget(name)
                else:
                    wanted.sizes[name] = before
            assert [outcome.name for outcome in outcomes[2:] if outcome.what == "evicted"] == gone
        elif what == "ask" and wanted.sizes:
            name = draw.choice(sorted(wanted.sizes))
            hits = [hit for hit in library.search(name, 99) if hit.name == name]
            library.parts(tiny.model, tiny.tokenizer, hits)
            wanted.use(name, asked=True)
        else:
            asked = max(wanted.asked, key=wanted.times.__getitem__, default=None)
            least = wanted.sizes.get(asked, 0)
            bound = draw.choice([least, least + 3 * size, 5 * size])
            gone = wanted.fit(bound)
            if gone is not None:
                assert [entry.name for entry in library.limit(bound, evict=True)] == gone
        assert there(Library(library.path)) == wanted.sizes
        assert sum(wanted.sizes.values()) <= bound
        time.sleep(TICK)
    files = {file.name.partition("-")[0] for file in (library.path / "caches").iterdir()}
    assert files == {record.key for record in library.documents}
    assert library.verify() == []
    assert library.limit(None) == []
    assert Library(library.path).about.max_bytes is None


def test_document_above_the_limit_fails_and_evicts_nothing(library, tiny):
    sizes = there(library)
    library.parts(tiny.model, tiny.tokenizer, library.search("rent", 1))
    library.limit(sum(sizes.values()))
    (outcome,) = library.add(tiny.model, tiny.tokenizer, [("long", text_of("long", 300))])
    assert outcome.what == "failed"
    assert re.fullmatch(
        r"max_bytes: the limit is .* take .*\. "
        r"Use .* to increase the limit, or remove some of the documents\.",
        outcome.reason,
    )
    assert there(library) == sizes
    assert len(list((library.path / "caches").iterdir())) == 3
    with pytest.raises(InvalidArgumentError, match="Use snapkv library limit"):
        library.limit(sizes["lease"] - 1)
    with pytest.raises(InvalidArgumentError, match="would evict 2 of the 3 documents"):
        library.limit(sizes["lease"])
    assert library.about.max_bytes == sum(sizes.values())
    gone = library.limit(sizes["lease"], evict=True)
    assert [entry.name for entry in gone] == ["loan", "garden"]
    with pytest.raises(LibraryError, match="there is no library"):
        Library(library.path / "none").limit(1)


def test_killed_add_loses_nothing_and_the_next_one_evicts(library, tiny, monkeypatch):
    sizes = there(library)
    library.limit(sum(sizes.values()))
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "remove", lambda *asked: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            library.add(tiny.model, tiny.tokenizer, [("new", TEXTS["loan"])])
    assert there(library).keys() == {*sizes, "new"}
    assert library.verify() == []
    outcomes = library.add(tiny.model, tiny.tokenizer, [("newer", TEXTS["loan"])])
    assert [(each.name, each.what) for each in outcomes] == [
        ("newer", "read"),
        ("lease", "evicted"),
        ("loan", "evicted"),
    ]
    assert library.verify() == []


def test_library_has_no_limit_until_one_is_set(library, tiny):
    file = library.path / "library.json"
    library.limit(10**9)
    assert Library(library.path).about.max_bytes == 10**9
    hits = library.search("rent", 1)
    with torch.no_grad():
        assert library.inputs(tiny.model, tiny.tokenizer, "Rent?", hits)
    file.write_text(file.read_text().replace(str(10**9), '"much"'))
    with pytest.raises(LibraryError, match=r"with the format 'snapkv library 2'"):
        Library(library.path)


def test_no_file_is_opened_to_add_below_the_limit():
    """Otherwise every add would read the whole library; a replaced document counts one time."""
    no_folder = object()
    room = SizeLimit(no_folder, [DocumentEntry("a", "a", None, 60)], 100)
    assert room.admit(DocumentEntry("b", "b", None, 40)) == []
    assert room.admit(DocumentEntry("a", "a", None, 50)) == []
    assert room.too_many(10, "c") == []
    with pytest.raises(AttributeError, match="last_used_at"):
        room.too_many(11, "c")


def test_least_recently_used_document_is_evicted_first():
    """An unused document counts from when it was written, and the newest one stays."""
    asked, written = {"a": 5, "b": 3, "c": 9}, {"a": 1, "b": 2, "c": 3, "d": 4}
    folder = SimpleNamespace(last_used_at=asked.get, written_at=written.get)
    limit = SizeLimit(folder, [DocumentEntry(key, key, None, 10) for key in "abcd"], 10)
    assert [entry.key for entry in limit.too_many()] == ["b", "d", "a"]
