"""No command takes an option that it then ignores."""

import dis
import importlib
import inspect
from types import CodeType, FunctionType

import pytest

from snapkv.cli.outputs import require_outputs
from tests.cli.commands import commands

OURS = ("snapkv.cli.", "snapkv_lab.cli.")
COMMANDS = {str(command): inspect.unwrap(command.callback) for command in commands()}


def words(said):
    """The names and texts in a function, or in a constant."""
    if isinstance(said, FunctionType | CodeType):
        for each in dis.get_instructions(said):
            yield from words(each.argval)
    elif isinstance(said, str):
        yield said
    elif isinstance(said, tuple | list | dict | frozenset):
        for each in said:
            yield from words(each)


def written(kind):
    """What a class has, but for what Python calls by itself.

    Whoever checks an option, or makes a dataclass of it, need not heed it.
    """
    return {name: part for name, part in vars(kind).items() if not name.startswith("__")}


def parts(found):
    """What a name of the command line stands for: functions, those of a class, or a constant."""
    found = inspect.unwrap(found) if inspect.isroutine(found) else getattr(found, "fget", found)
    if inspect.isclass(found) and found.__module__.startswith(OURS):
        return [part for each in written(found).values() for part in parts(each)]
    is_ours = getattr(found, "__module__", "snapkv.cli.").startswith(OURS)
    return [found] if is_ours and found not in COMMANDS.values() else []


def read_by(command, kind):
    """The words of a command that takes options of a kind, and of all that it calls."""
    own = {name: part for each in reversed(kind.__mro__) for name, part in written(each).items()}
    todo, seen, said = [command, require_outputs], [], set()
    while todo:
        part = todo.pop()
        if any(part is each for each in seen):
            continue
        seen.append(part)
        found = set(words(part))
        said |= found
        if isinstance(part, FunctionType):
            modules = [word for word in found if word.startswith(OURS)]
            homes = [vars(importlib.import_module(module)) for module in modules]
            for home in (part.__globals__, own, *homes):
                todo += [each for name in found & home.keys() for each in parts(home[name])]
    return said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_read_by_its_command(name):
    command = COMMANDS[name]
    taken = inspect.get_annotations(command, eval_str=True)
    kind = taken.get("options", object)
    names = {*taken, *getattr(kind, "__dataclass_fields__", {})} - {"return"}
    assert names - read_by(command, kind) == set()
