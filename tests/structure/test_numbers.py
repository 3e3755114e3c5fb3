"""The numbers of the structure, each on a source small enough to count by hand."""

import pytest

from tests.structure.__main__ import main
from tests.structure.classes import classes
from tests.structure.functions import functions, layer_members
from tests.structure.source import Source, import_circles


@pytest.fixture
def made_up(tmp_path):
    def make(**files):
        for name, text in files.items():
            path = tmp_path / "snapkv" / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return Source(tmp_path / "snapkv")

    return make


def attributes(source):
    return {info.name: sorted(info.attributes) for info in classes(source)}


def test_attributes_are_what_self_and_the_body_are_given(made_up):
    source = made_up(
        base="class Base:\n"
        "    kind = 'base'\n"
        "    size: int\n"
        "    __slots__ = ()\n"
        "    def __init__(self, x):\n"
        "        self.a, (self.b, x.c) = 1, (2, 3)\n"
        "        self.d: int = 1\n"
        "        object.__setattr__(self, 'e', 1)\n"
        "        for self.f in x: self.a += 1\n"
        "        self.seen.g = 1\n"
        "    @property\n"
        "    def seen(self): return self.a\n"
        "    @staticmethod\n"
        "    def other(x): x.y = 1\n",
        more="from snapkv.base import Base\nimport snapkv.base\n"
        "class More(Base):\n    def f(this): this.h = this.a = 1\n"
        "class Dotted(snapkv.base.Base): ...\n",
        last="from .more import More as Other\nclass Last(Other, dict): i = 1",
    )
    base = ["a", "b", "d", "e", "f", "kind", "size"]
    assert attributes(source) == {
        "Base": base,
        "More": sorted([*base, "h"]),
        "Dotted": base,
        "Last": sorted([*base, "h", "i"]),
    }


def test_records_are_told_by_their_syntax(made_up):
    source = made_up(
        records="@dataclass(frozen=True, kw_only=True)\nclass Frozen:\n    a: int\n"
        "@dataclass\nclass Loose: ...\n@dataclass(frozen=False)\nclass Thawed: ...\n"
        "class Pair(typing.NamedTuple): ...\nclass Kind(StrEnum): ...\n"
        "class Under(Frozen): ...\nclass Plain: ...\n",
    )
    assert [info.name for info in classes(source) if info.is_record] == [
        "Frozen",
        "Pair",
        "Kind",
        "Under",
    ]


def test_a_function_is_as_long_as_from_def_to_its_last_line(made_up):
    source = made_up(
        ops="@cache\ndef short(): ...\n\n\ndef long(\n    x,\n):\n    def inner():\n        ...\n\n"
        "    return x\n\n@triton.jit\ndef kernel(): ...\n",
        ops__votes__triton="def launch(): ...",
    )
    found = {info.name: (info.lines, info.is_kernel) for info in functions(source)}
    assert found == {
        "short": (1, False),
        "long": (7, False),
        "inner": (2, False),
        "kernel": (1, True),
        "launch": (1, True),
    }


def test_circles_hide_in_functions_and_types(made_up):
    source = made_up(
        __init__="from snapkv.a import f",
        a="def f():\n    from snapkv import b",
        b="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .room.c import g",
        room__c="import snapkv.a as first",
        room__d="from snapkv import a, __version__",
    )
    assert import_circles(source) == [["snapkv.a", "snapkv.b", "snapkv.room.c"]]


def test_members_of_a_layer_are_counted_once(made_up):
    source = made_up(
        attention="def f(layer, other, handed, stored: 'CompressedLayer | None'):\n"
        "    layer.keys = other.values\n    mine = handed.layer\n"
        "    mine.settle(stored.kept, layer.slots.seen, getattr(layer, 'held'))\n",
        hf__attend="def f(layer): return layer.keys, layer.pads",
        selection="def f(layer): return layer.policy",
    )
    found = layer_members(source)
    assert found == {"keys", "settle", "kept", "slots", "held", "pads"}


def test_the_exit_status_says_whether_a_limit_is_broken(made_up, capsys):
    source = made_up(a="x = 1")
    assert main([str(source.folder)]) == 0
    assert "NOT OK" not in capsys.readouterr().out
    made_up(b="class Big:\n" + "".join(f"    a{i} = {i}\n" for i in range(15)))
    assert main([str(source.folder)]) == 1
    assert "NOT OK (1)   Big 15 (b.py)" in capsys.readouterr().out
