"""An inspection in words: headings and places, the opening sentence, differences of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapkv.inspector.leave_out import Span, needed_spans
from snapkv.inspector.scores import KeptOf
from snapkv.inspector.words import Places, headings, sentence, word_changes
from snapkv.library.records import Text

ANSWERS = st.text(st.sampled_from("ab .\n"), max_size=30)
SPANS = [
    Span(start=0, stop=2, loss=0.1, changed=False),
    Span(start=2, stop=4, loss=0.5, changed=True),
    Span(start=4, stop=8, loss=2.0, changed=True),
]

CONTRACT = """# Agreement

## 9 Duration

9.10 Renewal. It renews every year.
9.11 Termination for convenience
Either party may terminate with 30 days of notice.

§ 10 Notices
By letter."""


def titles(name, text):
    return [title for _, title in headings(name, text)]


def test_headings_of_a_contract_begin_where_their_lines_do():
    found = list(headings("contract.md", CONTRACT))
    assert [title for _, title in found] == [
        "“Agreement”",
        "“9 Duration”",
        "§ 9.10",
        "§ 9.11 “Termination for convenience”",
        "§ 10 “Notices”",
    ]
    for at, title in found:
        assert CONTRACT[:at] == "" or CONTRACT[at - 1] == "\n", title


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Scope\n=====\ntext", ["“Scope”"]),
        ("Scope\n-----\nA line\nthat goes on", ["“Scope”"]),
        ("### 3.2 Fees ###", ["§ 3.2 “Fees”"]),
        ("Section 4: Fees", ["Section 4 “Fees”"]),
        ("Article 12\nThe parties agree.", ["Article 12"]),
        ("3.1 Fees\n3.2 Terms\n", ["§ 3.1 “Fees”", "§ 3.2 “Terms”"]),
        ("# Use\n```\n# a comment\n```\n# End", ["“Use”", "“End”"]),
        ("it is cheaper by\n3.5 Euros a day", []),
        ("3.5 euros a day", []),
        ("12.10.2024 Meeting", []),
        ("1. Buy milk", []),
        ("#hashtag", []),
        ("plain text", []),
        ("4.1 " + "A long title " * 9, ["§ 4.1"]),
    ],
    ids=str,
)
def test_what_is_a_heading(text, expected):
    assert titles("notes.txt", text) == expected


@pytest.mark.parametrize(
    "line",
    [
        "# a" + " " * 200_000 + "b",
        "# " + "#" * 200_000 + "b",
        "# " * 50_000 + "x",
        "9.11 " * 50_000,
    ],
    ids=["spaces", "marks", "nested", "numbers"],
)
def test_a_line_that_is_longer_than_a_heading_is_none(line):
    """At once: a stranger may have written it."""
    assert titles("x.md", line) == []


def test_marks_within_a_heading_stay_in_it_and_comments_of_source_code_are_none():
    assert titles("x.md", "# C# and # ##\n## ##\n# # x") == ["“C# and #”", "“# x”"]
    assert titles("gzip.py", "# Scope\n\n5.1 Fees") == []


def place(text, name, pieces=None, wanted="X", others=()):
    """Of the piece that is wanted, in a prompt with something before and behind the document."""
    pieces = pieces or ["<user>\n", *text, "\n\nWhen?"]
    documents = [Text(name=name, text=text), *others]
    at = pieces.index(wanted)
    return Places(pieces, documents).place_name(at, at + 1)


def test_the_last_heading_before_it_or_a_line_and_how_far_in():
    assert place("# One\n\ntext\n\n# Two\n\nan X here", "a.md") == "“Two”"
    assert place("ab\n" * 5 + "X\n" + "ab\n" * 4, "a.py") == "line 6, 52% into a.py"
    assert place("abcX", "a.txt") == "75% into a.txt"
    assert place("ab X\n\n# Two\n", "a.md") == "line 1, 25% into a.md"


def test_several_documents_are_named():
    first, second = "# One\n\ntext", "# Two\n\nX"
    pieces = ["===== a.md =====\n", first, "\n\n===== b.md =====\n", *second, "\n\nWhen?"]
    documents = [Text(name="a.md", text=first), Text(name="b.md", text=second)]
    at = pieces.index("X")
    assert Places(pieces, documents).place_name(at, at + 1) == "“Two” of b.md"


def test_before_and_behind_the_document():
    pieces = ["<user>\n", "text", "\n\nWhen?"]
    places = Places(pieces, [Text(name="a.txt", text="text")])
    assert [places.place_name(i, i + 1) for i in range(3)] == [
        "the beginning of the prompt",
        "50% into a.txt",
        "the question",
    ]


def test_a_part_lies_where_its_middle_does():
    pieces = ["# One\n\nabc\n\n", "# Two\n\nabcdefghijklmnop"]
    places = Places(pieces, [Text(name="a.md", text="".join(pieces))])
    assert places.place_name(0, 2) == "“Two”"
    assert places.place_name(0, 1) == "“One”"


@pytest.mark.parametrize("documents", [[], [Text(name="a.txt", text="rewritten")]])
def test_a_share_of_the_prompt_where_documents_are_not_found(documents):
    assert Places(["aaaa", "bbbb"], documents).place_name(1, 2) == "the text 75% into the prompt"


def test_the_part_that_is_missed_most_comes_first_and_only_what_changes_the_answer():
    more = Span(start=8, stop=9, loss=1.0, changed=True)
    assert needed_spans([*SPANS, more]) == [Span(start=2, stop=9, loss=2.0, changed=True)]
    apart = Span(start=9, stop=10, loss=9.0, changed=True)
    between = Span(start=8, stop=9, loss=99.0, changed=False)
    assert needed_spans([*SPANS, between, apart]) == [
        apart,
        Span(start=2, stop=8, loss=2.0, changed=True),
    ]
    assert needed_spans([]) == []


@pytest.mark.parametrize(
    ("places", "share", "held", "expected"),
    [
        (["§ 9.11"], 1.0, 0.08, "The answer needs § 9.11; all of it was kept, in 8.0%"),
        (["§ 9.11"], 0.0, 0.25, "The answer needs § 9.11; none of it was kept, in 25%"),
        (["§ 1", "§ 2"], 0.999, 0.999, "The answer needs § 1 and § 2; 99% of it was kept, in 99%"),
        (["§ 1", "§ 2", "§ 1"], 0.5, 1.0, "needs § 1 and § 2; 50% of it was kept, in 100%"),
        (["a", "b", "c"], 0.0001, 0.5, "needs a, b and 1 more place; 0.1% of it was kept"),
        (["a", "b", "c", "d"], 1.0, 0.5, "needs a, b and 2 more places; all of it"),
    ],
)
def test_the_sentence(places, share, held, expected):
    assert expected in sentence(SPANS, places, KeptOf(share=share, heads=1, of_heads=2), held)


def test_what_is_not_known_is_not_claimed():
    assert sentence([], [], None, 0.08).startswith("What the answer needs was not measured;")
    assert sentence(SPANS[:1], [], None, 0.08).startswith("Masking any single part of the prompt")


def test_a_word_that_another_takes_the_place_of():
    assert word_changes("required by RFC 1952. Yes", "required by RFC 3339. Yes") == [
        ("same", "required by RFC"),
        ("gone", " 1952."),
        ("new", " 3339."),
        ("same", " Yes"),
    ]


def test_long_answers_that_go_in_circles_are_compared_as_a_whole_where_they_part():
    """At once: small models repeat themselves."""
    before, after = "yes" + " yes no" * 3000, "yes" + " yes no no" * 3000
    changes = word_changes(before, after)
    assert changes[0] == ("same", "yes yes no")
    assert [kind for kind, _ in changes] == ["same", "gone", "new"]
    assert "".join(text for kind, text in changes if kind != "new") == before
    assert "".join(text for kind, text in changes if kind != "gone") == after


@given(ANSWERS, ANSWERS)
def test_the_runs_make_both_answers(before, after):
    changes = word_changes(before, after)
    assert "".join(text for kind, text in changes if kind != "new") == before
    assert "".join(text for kind, text in changes if kind != "gone") == after
    assert all(text for _, text in changes)
