"""The index of a library's words: BM25 over the present documents, or a refusal."""

import functools
import math
import os
import random
import re
import shutil
import sqlite3
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from snapkv.cache.saving.files import write_sealed
from snapkv_app import Library
from snapkv_app.library import index, searching
from snapkv_app.library.about import About
from snapkv_app.library.folder import Folder
from snapkv_app.library.records import Text, lines_of, passages

WORDS = [f"{letter}{letter}x" for letter in "bcdfghklmn"]  # none has a stem
QUESTION = "bbx ccx dx the ddx"


def put(folder, name, text):
    given = Text(name=name, text=text)
    save = functools.partial(write_sealed, tensors={}, notes={}, sweep=False)
    return folder.write(given, 1, save, folder.record(given.key))


def made(path, texts, **options):
    """A library of texts that no model has read."""
    folder = Folder(path)
    with folder.changing():
        folder.begin(ABOUT)
        for name, text in texts.items():
            put(folder, name, text)
    return Library(path, **options)


ABOUT = About(
    model={}, model_name="none", tokenizer="", prefix_ids=(), policy={"name": "full"}, bits=None
)


def drawn_texts(seed, count=12):
    draw = random.Random(seed)
    texts = (" ".join(draw.choices(WORDS, k=draw.randrange(1, 30))) for _ in range(count))
    return {f"n{place}": text for place, text in enumerate(texts)}


def bm25(texts, question):
    """By its definition, with Lucene's weight of a word, k1 = 1.2 and b = 0.75."""
    bags = {name: Counter([name, *text.split()]) for name, text in texts.items()}
    mean = sum(map(Counter.total, bags.values())) / len(bags)
    scores = Counter()
    for word in set(question.split()) - {"the"}:
        found = sum(word in bag for bag in bags.values())
        weight = math.log(1 + (len(bags) - found + 0.5) / (found + 0.5))
        for name, bag in bags.items():
            length = 1.2 * (0.25 + 0.75 * bag.total() / mean)
            scores[name] += weight * bag[word] * 2.2 / (bag[word] + length)
    return {name: score for name, score in scores.items() if score}


def found(library, question=QUESTION):
    return {hit.name: hit.score for hit in library.search(question, 100)}


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_scores_are_bm25_of_the_present_documents(tmp_path, seed, settled):
    texts, draw = drawn_texts(seed), random.Random(seed)
    library = made(tmp_path / "l", texts, on_notice=pytest.fail)
    folder = Folder(library.path)
    for step in range(4):
        if settled:  # its last change was long ago
            os.utime(library.path / "documents", ns=(step, step))
        wanted = bm25(texts, QUESTION)
        for asked in (library, Library(library.path)):
            scores = found(asked)
            assert scores == pytest.approx(wanted, rel=1e-6)
            assert list(scores.values()) == sorted(scores.values(), reverse=True)
        gone = draw.choice(sorted(texts))
        del texts[gone]
        library.remove([gone])
        for name in draw.sample(sorted(texts), 2):
            texts[name] = f"{texts[name]} ddx"
            put(folder, name, texts[name])
        texts[f"new{step}"] = "bbx ffx"
        put(folder, f"new{step}", "bbx ffx")
    assert library.verify() == []


def test_unusable_index_file_is_replaced_by_one_in_memory(tmp_path):
    notices, texts = [], drawn_texts(0)
    library = made(tmp_path / "l", texts, on_notice=notices.append)
    library._folder.index_file.mkdir()  # as in a folder that is read only, it cannot be opened
    assert found(library) == pytest.approx(bm25(texts, QUESTION))
    assert not notices
    library._folder.index_file.rmdir()
    library._folder.index_file.write_bytes(b"no index" * 200)
    for _ in range(2):
        assert found(Library(library.path, on_notice=notices.append))
    assert len(notices) == 2
    assert "words.sqlite' cannot be used: file is not a database. Delete it" in notices[0]
    assert [fault.name for fault in library.verify()] == ["words.sqlite"]
    library._folder.index_file.unlink()
    with closing(sqlite3.connect(library._folder.index_file)) as other:
        other.execute("create table spans(other)")
        other.execute(f"pragma user_version = {index._VERSION}")
    assert found(Library(library.path, on_notice=notices.append))
    assert "words.sqlite' cannot be used: no such table" in notices.pop()
    with closing(sqlite3.connect(library._folder.index_file)) as other:
        other.execute("pragma user_version = 0")  # as an earlier version has left it
    assert found(Library(library.path, on_notice=pytest.fail))
    assert library.verify() == []


def test_flipped_byte_of_the_index_is_named_or_harmless(tmp_path):
    library = made(tmp_path / "l", drawn_texts(1, count=30))
    wanted = library.search(QUESTION, 100)
    file = library._folder.index_file
    whole, draw, named = file.read_bytes(), random.Random(0), 0
    used = [place for place, byte in enumerate(whole) if byte]
    for place in draw.sample(used, 150):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        faults = library.verify()
        named += bool(faults)
        if not faults:
            assert Library(library.path).search(QUESTION, 100) == wanted, place
    assert named > 50


def test_changed_word_of_the_index_is_named(tmp_path):
    library = made(tmp_path / "l", drawn_texts(1, count=30))
    library.search(QUESTION, 100)
    file = library._folder.index_file
    whole, named = file.read_bytes(), []
    for found in re.finditer(rb"[a-z]{2}x(?=[\x01-\x1f])", whole):
        place = found.end() - 1
        file.write_bytes(whole[:place] + b"y" + whole[place + 1 :])
        named.append(bool(library.verify()))
    assert all(named)
    assert len(named) > 20


def test_searches_during_adds_find_every_earlier_document(tmp_path):
    library = made(tmp_path / "l", drawn_texts(2))
    folder = Folder(library.path)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(found, Library(library.path)) for _ in range(8)]
        for number in range(8):
            put(folder, f"late{number}", "bbx")
        seen = [each.result() for each in asked]
    assert all(len(each) >= len(bm25(drawn_texts(2), QUESTION)) for each in seen)
    assert {f"late{number}" for number in range(8)} <= found(library).keys()
    with closing(sqlite3.connect(folder.index_file)) as index, index:
        (documents,) = index.execute("select count(*) from documents").fetchone()
    assert documents == len(library.documents)
    assert library.verify() == []


def test_record_damaged_in_place_is_named_and_not_found(tmp_path):
    notices, texts = [], drawn_texts(3)
    library = made(tmp_path / "l", texts, on_notice=notices.append)
    os.utime(library.path / "documents", ns=(1, 1))  # long settled
    before = library.search(QUESTION, 100)
    file = library.path / "documents" / f"{before[0].key}.json"
    file.write_bytes(file.read_bytes()[:-9] + b"x")
    os.utime(file.parent, ns=(1, 1))
    del texts[before[0].name]
    assert found(library) == pytest.approx(bm25(texts, QUESTION))
    assert len(notices) == 1
    assert str(file) in notices[0]


SCRIPTS = {
    "hi": "हिन्दी भाषा",
    "th": "ภาษาไทย ง่าย",
    "de": "Müller kündigt",
    "tr": "İstanbul",
    "ar": "اللُّغَة",
    "el": "ΣΊΣΥΦΟΣ",
    "code": "max_new_tokens",
    "zh": "合同 终止",
    "ja": "バラを三月に 切る",
    "ko": "임대차 계약을",
}


CHINESE = {
    "lease": "租赁合同规定。租户可以提前三个月通知终止租约。租金在五月到期。",
    "loan": "银行贷款四万克朗。年利率为百分之四。合同在五年后终止。",
    "garden": "玫瑰在三月修剪。番茄需要阳光。早上浇水。",
}


def test_words_of_scripts_without_spaces_are_found(tmp_path):
    library = made(tmp_path / "l", CHINESE | {"long": "春天到了。" * 300 + "番茄红了。" * 20})
    for question, names in {
        "租户什么时候可以终止租约?": ["lease", "loan"],
        "番茄需要什么?": ["garden", "long"],
        "利率 4%": ["loan"],
        "知通": [],  # in the other order
        "银": ["loan"],
    }.items():
        assert [hit.name for hit in library.search(question)] == names
    best = library.search("番茄红了")[0]
    assert best.name == "long"
    assert len(best.passage) <= 250
    assert "番茄红了" in best.passage
    assert best.passage in "春天到了。" * 300 + "番茄红了。" * 20


@pytest.mark.parametrize(
    ("passage", "question"),
    [
        ("The o\ufb03ce safe has 47 \ufb01les.", "How many files are in the office?"),
        ("The termi\u00adnation clause is nine.", "termination"),
        ("The termi-\nnation clause is nine.", "termination"),
        ("The well-\n  known clause is nine.", "known"),
        ("The termi\u200bnation clause is nine.", "termination"),
        ("\uff34\uff4f\uff4b\uff59\uff4f ends.", "Tokyo"),
        ("The termination clause is nine.", "termi\u00adnation"),
    ],
    ids=["ligature", "soft", "hyphen", "compound", "invisible", "full width", "question"],
)
def test_word_is_found_in_every_typesetting(tmp_path, passage, question):
    texts = {f"wall {n}": f"The garden is quiet, and the wall {n} is old." for n in range(4)}
    library = made(tmp_path / "l", texts | {"typeset": passage})
    (hit,) = library.search(question)
    assert (hit.name, hit.passage) == ("typeset", passage)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_word_is_found_in_every_script_and_form(tmp_path, name, form):
    library = made(tmp_path / "l", SCRIPTS)
    for word in SCRIPTS[name].split():
        question = unicodedata.normalize(form, f'"{word}"*')
        assert [hit.name for hit in library.search(question)] == [name]


def test_index_is_locked_while_found_documents_are_looked_up(tmp_path, monkeypatch):
    """A freed row may get the passage of another document."""
    library, ranked = made(tmp_path / "l", drawn_texts(4)), searching._ranked
    wanted = library.search(QUESTION)

    def meanwhile(*asked):
        found = ranked(*asked)
        with closing(sqlite3.connect(library._folder.index_file, timeout=0)) as other:
            other.execute("delete from spans")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.commit()
        return found

    monkeypatch.setattr(searching, "_ranked", meanwhile)
    assert library.search(QUESTION) == wanted


def test_index_copied_from_another_folder_is_updated(tmp_path):
    own, other = (made(tmp_path / name, {name: name}) for name in ("bbx", "ccx"))
    for library in (own, other):
        os.utime(library.path / "documents", ns=(1, 1))  # as archives set it
        library.search(QUESTION)
    shutil.copy2(other._folder.index_file, own._folder.index_file)
    assert found(own, "bbx").keys() == {"bbx"}
    assert own.verify() == []


def test_one_character_word_is_found_but_no_end_of_a_contraction(tmp_path):
    texts = {
        f"n{place}": f"chapter {place}: the hero is {name}" for place, name in enumerate("xyz")
    }
    library = made(tmp_path / "l", texts | {"apart": "what it s worth"})
    assert library.search("Who is the hero of chapter 2?")[0].name == "n2"
    assert [*found(library, "z")] == ["n2"]
    assert not found(library, "How's that?")
    assert not found(library, "How\u2019s that?")
    assert not found(library, "The")  # which is in every text, and is no word to find by


def test_equal_documents_keep_their_order_after_one_is_added_again(tmp_path):
    texts = {f"n{place}": "bbx ccx" for place in range(4)}
    library = made(tmp_path / "l", texts)
    before = library.search("bbx")
    with library._folder.changing():
        put(library._folder, "n1", "bbx ccx")
    assert library.search("bbx") == before


def test_index_with_an_interrupted_change_is_not_damaged(tmp_path):
    library = made(tmp_path / "l", drawn_texts(1))
    library.search(QUESTION)
    file, journal = library._folder.index_file, tmp_path / "l" / "words.sqlite-journal"
    with closing(sqlite3.connect(file)) as own:
        own.execute("pragma cache_size = 1")
        own.execute("begin")
        own.executemany("insert into mark values (?)", [("x" * 4000,)] * 200)
        cut_off = file.read_bytes(), journal.read_bytes()
    file.write_bytes(cut_off[0])
    journal.write_bytes(cut_off[1])
    assert library.verify() == []
    assert library.search(QUESTION)
    assert not journal.exists()


def test_passages_overlap_and_their_line_numbers_are_found():
    text = "\n".join(f"w{number}" for number in range(350))
    assert [lines_of(text, span) for span in passages(text)] == [(1, 200), (151, 350)]
