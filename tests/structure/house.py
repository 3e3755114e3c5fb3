"""The rules of the house, each a function from a source to the places that break it."""

import ast

from tests.structure.source import circles

# From the ground up: a room may import from its own row and from the rows above it in this list.
ROWS = (
    ("errors",),
    ("validation", "cache_folder", "packages", "word_index"),
    ("ops",),
    ("policies",),
    ("storage",),
    ("cache",),
    ("hf",),
    ("prefill", "decoding", "document", "kvzip", "library", "plan"),
    ("__init__",),
    ("app", "serving"),
    ("lab",),
    ("cli",),
    ("__main__",),
)

# Rooms that see less than what their row allows: tensors know no policy, vLLM's plugin no cache.
NARROW = {
    "storage": {"errors", "validation", "ops"},
    "serving": {"errors", "validation", "ops", "policies"},
}

STATES = {"keys", "values"}
IN_PLACE = "_"

# Files that see more than their room: those that exchange documents with the library.
OPENINGS = {
    "serving/documents/folder.py": {"cache"},
    "serving/documents/files.py": {"storage", "cache", "hf", "app"},
    "serving/documents/plain.py": {"storage", "cache", "hf"},
}


def room_of(source, module):
    """The part of the top level that a module belongs to, by its name there."""
    return source.label(module).split("/")[0].removesuffix(".py")


def strangers(source):
    """What lies at the top level and has no row."""
    known = {name for row in ROWS for name in row}
    ignored = {"py.typed", "__pycache__"}
    names = {path.name for path in source.folder.iterdir()} - ignored
    return sorted(name for name in names if name.removesuffix(".py") not in known)


def upward_imports(source):
    """Imports that go up the rows or leave what a narrow room may see.

    Those inside functions and under `TYPE_CHECKING` count like any other.
    """
    found = []
    for module in source.modules.values():
        room = room_of(source, module)
        for name in sorted(source.imports(module)):
            other = room_of(source, source.modules[name])
            opened = OPENINGS.get(source.label(module), set())
            if other != room and not _may_import(room, other, opened):
                found.append(f"{source.label(module)} imports {name}")
    return found


def _may_import(room, other, opened):
    levels = {name: level for level, row in enumerate(ROWS) for name in row}
    if room not in levels or other not in levels:
        return False
    if room in NARROW and other not in NARROW[room] | opened:
        return False
    return levels[other] <= levels[room]


def room_circles(source):
    """Rooms that import each other, if only by way of a third."""
    imports = {room_of(source, module): set() for module in source.modules.values()}
    for module in source.modules.values():
        room = room_of(source, module)
        others = {room_of(source, source.modules[name]) for name in source.imports(module)}
        imports[room] |= others - {room}
    return circles(imports)


def states_written_elsewhere(source, home="storage"):
    """Where anything but a store assigns an attribute `keys` or `values`, or writes into it."""
    return [
        f"{source.label(module)}:{node.lineno}"
        for module in source.modules.values()
        if room_of(source, module) != home
        for node in ast.walk(module.tree)
        if _writes_states(node)
    ]


def _writes_states(node):
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del(), attr=name):
            return name in STATES
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=ast.Attribute(attr=name)):
            return name in STATES
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name), attr=method)):
            return name in STATES and method.endswith(IN_PLACE) and not method.startswith("_")
        case ast.Call(func=function, args=[_, ast.Constant(value=str(name)), *_]):
            called = getattr(function, "attr", getattr(function, "id", ""))
            return called in ("setattr", "__setattr__") and name in STATES
    return False
