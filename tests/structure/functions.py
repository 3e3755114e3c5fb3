"""How long functions are, and what the seam touches of a layer."""

import ast
import re
from dataclasses import dataclass

SEAM_FILES = ("attention.py", "attend.py")
LAYER_CLASS = re.compile(r"(Compressed|Cache)Layer\b")


@dataclass(frozen=True, kw_only=True)
class FunctionInfo:
    """A function, from its `def` to the last line of its body."""

    name: str
    file: str
    lines: int
    is_kernel: bool


def functions(source):
    """Every function and method of a package, nested ones included.

    Kernels are those of files called `triton*` and those that triton compiles.
    """
    return [
        FunctionInfo(
            name=node.name,
            file=source.label(module),
            lines=node.end_lineno - node.lineno + 1,
            is_kernel=module.path.name.startswith("triton") or _is_compiled(node),
        )
        for module in source.modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _is_compiled(node):
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def layer_members(source, files=SEAM_FILES):
    """The distinct members of a layer that the files of these names touch.

    A layer is what is called `layer`, alone or behind a dot, or is annotated with a class whose
    name ends in `CompressedLayer` or `CacheLayer`; also what such a thing is assigned to.
    """
    members = set()
    for module in source.modules.values():
        if module.path.name in files:
            members |= _members(module.tree)
    return members


def _members(tree):
    names = {"layer"} | {
        node.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        and node.annotation
        and LAYER_CLASS.search(ast.unparse(node.annotation))
    }
    members = set()
    for _ in range(2):  # a second time with the names that the first has found
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_layer(
                    value, names
                ):
                    names.add(name)
                case ast.Attribute(value=value, attr=name) if _is_layer(value, names):
                    members.add(name)
                case ast.Call(
                    func=ast.Name(id="getattr" | "setattr" | "hasattr"),
                    args=[value, ast.Constant(value=str(name)), *_],
                ) if _is_layer(value, names):
                    members.add(name)
    return members


def _is_layer(node, names):
    match node:
        case ast.Name(id=name):
            return name in names
        case ast.Attribute(attr="layer"):
            return True
    return False
