"""How many attributes an object of each class has, those of its bases in the package included."""

import ast
from dataclasses import dataclass

RECORD_BASES = {"NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}


@dataclass(frozen=True, kw_only=True)
class ClassInfo:
    """A class, where it stands, and the attributes that it has."""

    name: str
    file: str
    attributes: frozenset[str]
    is_record: bool


def classes(source):
    """Every class of a package, nested ones included.

    An attribute is what is assigned through self in any method, and what is assigned or annotated
    in the class's body (so the fields of dataclasses); dunder names, properties and methods do not
    count. A record is a frozen dataclass, a NamedTuple, a TypedDict or an Enum: options,
    measurements, parameters, which no method can change.
    """
    return [
        ClassInfo(
            name=node.name,
            file=source.label(module),
            attributes=frozenset(_with_bases(source, module, node)),
            is_record=_is_record(source, module, node),
        )
        for module in source.modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]


def own_attributes(node):
    """What one class itself assigns or annotates."""
    names = set()
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            names |= _targets([part.target])
        elif isinstance(part, ast.Assign):
            names |= _targets(part.targets)
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= _through_self(part)
    return {name for name in names if not (name.startswith("__") and name.endswith("__"))}


def _targets(targets):
    return {
        part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
    }


def _through_self(method):
    arguments = [*method.args.posonlyargs, *method.args.args]
    if not arguments or _decorated(method, "staticmethod") or _decorated(method, "classmethod"):
        return set()
    this = arguments[0].arg
    names = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == this:
                names.add(node.attr)
        elif isinstance(node, ast.Call) and _ends_in(node.func, "__setattr__", "setattr"):
            match node.args:
                case [ast.Name(id=target), ast.Constant(value=str(name)), _] if target == this:
                    names.add(name)
    return names


def _with_bases(source, module, node, seen=()):
    names = own_attributes(node)
    for base in node.bases:
        found = _find_class(source, module, base)
        if found is not None and found[1] not in seen:
            names |= _with_bases(source, *found, (*seen, node))
    return names


def _is_record(source, module, node):
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and _ends_in(decorator.func, "dataclass"):
            return any(
                option.arg == "frozen" and getattr(option.value, "value", None) is True
                for option in decorator.keywords
            )
    if any(_ends_in(base, *RECORD_BASES) for base in node.bases):
        return True
    found = [_find_class(source, module, base) for base in node.bases]
    return any(other is not None and _is_record(source, *other) for other in found)


def _find_class(source, module, expression, depth=0):
    """The module and the definition of a base class; None where it is not of the package."""
    if isinstance(expression, ast.Subscript):
        return _find_class(source, module, expression.value, depth)
    if isinstance(expression, ast.Attribute):
        home = source.imported_names(module).get(ast.unparse(expression.value), ("", None))[0]
        return _named_in(source, home, expression.attr, depth)
    return _named_in(source, module.name, getattr(expression, "id", ""), depth)


def _named_in(source, home, name, depth):
    module = source.modules.get(home)
    if module is None or depth > 8:
        return None
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
    onward, renamed = source.imported_names(module).get(name, ("", None))
    return _named_in(source, onward, renamed, depth + 1) if renamed else None


def _decorated(node, name):
    return any(_ends_in(decorator, name) for decorator in node.decorator_list)


def _ends_in(expression, *names):
    """Whether an expression is one of these names, alone or behind a dot."""
    return getattr(expression, "attr", getattr(expression, "id", None)) in names
