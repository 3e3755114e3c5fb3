"""vLLM's files read as text: what a release has of what `coupling` lists, without importing it."""

import ast
import functools
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MORE = "..."
"""Ends `Part.signatures` that may have further parameters."""

OR = " or "


@dataclass(frozen=True)
class Part:
    """A function, class, value or module of vLLM, and what of it is used.

    Attributes:
        name: such as ``v1.request.Request``; where releases have it in different places, all of
            them with `OR` between.
        use: what the plugin does with it, in a word or two.
        signatures: parameters by method, of a function by "", without ``self`` and in order;
            `MORE` at the end where there may be others behind them.
        attributes: names that the class or its instances have, of a module its values.
        steps: texts that follow one another in the source of a method, by method; "" is the whole.
        optional: that releases may be without it.
    """

    name: str
    use: str
    signatures: Mapping[str, str] = field(default_factory=dict)
    attributes: str = ""
    steps: Mapping[str, Sequence[str]] = field(default_factory=dict)
    optional: bool = False

    @property
    def names(self) -> list[str]:
        return self.name.split(OR)


@dataclass(frozen=True)
class Difference:
    """Something that a release has otherwise; the plugin cannot run where it is `missing`."""

    part: str
    line: str
    missing: bool

    def __str__(self) -> str:
        return f"vllm.{self.part}: {self.line}"


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class _Found:
    """Where a name is bound: its definition, and the module that has it."""

    module: str
    node: ast.AST


class Release:
    """The Python files of one release: of a wheel, or of the folder that holds ``vllm``."""

    def __init__(self, place: Path) -> None:
        self._wheel = zipfile.ZipFile(place) if place.is_file() else None
        self._folder = place
        self._names = set(self._wheel.namelist()) if self._wheel else set()
        self._read: dict[str, ast.Module | None] = {}
        self._lines: dict[str, list[str]] = {}

    def differences(self, parts: Sequence[Part]) -> list[Difference]:
        """What this release has otherwise than these parts say."""
        return [one for part in parts for one in self._of(part)]

    def _of(self, part: Part) -> Iterator[Difference]:
        places = (self._as_module(name) or self._find(name) for name in part.names)
        owner = next(filter(None, places), None)
        if owner is None:
            if not part.optional:
                yield Difference(part.name, "is not there", missing=True)
            return
        known = self._attributes(owner)
        for name in (*part.attributes.split(), *filter(None, part.signatures)):
            if name not in known:
                yield Difference(part.name, f"has no {name}", missing=True)
        for method, expected in part.signatures.items():
            found = self._method(owner, method)
            if found is not None and (line := _otherwise(found, expected)):
                yield Difference(part.name, f"{method} {line}".strip(), missing=True)
        for method, texts in part.steps.items():
            found = self._method(owner, method)
            source = "" if found is None else self._source(found)
            if (text := _first_missing(source, texts)) is not None:
                place = method or "it"
                line = f"{place} does not go on with {text!r}, as {texts[0]!r} and so on would"
                yield Difference(part.name, line, missing=False)

    # Files.

    def _text(self, path: str) -> str | None:
        if self._wheel is not None:
            return self._wheel.read(path).decode() if path in self._names else None
        file = self._folder / path
        return file.read_text() if file.is_file() else None

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._read:
            path = "/".join(("vllm", *filter(None, name.split("."))))
            for one in (f"{path}.py", f"{path}/__init__.py"):
                text = self._text(one)
                if text is not None:
                    self._read[name], self._lines[name] = ast.parse(text), text.splitlines(True)
                    break
            else:
                self._read[name] = None
        return self._read[name]

    def _source(self, found: _Found) -> str:
        lines = self._lines[found.module]
        if isinstance(found.node, _Definition):
            lines = lines[found.node.lineno - 1 : found.node.end_lineno]
        return "".join(lines)

    # Names.

    def _find(self, dotted: str) -> _Found | None:
        """What a name within vLLM stands for, followed to where it is defined."""
        module, _, name = dotted.rpartition(".")
        if self._module(module) is None:
            outer = self._find(module) if module else None
            return None if outer is None else self._method(outer, name)
        return self._in_module(module, name)

    def _in_module(self, module: str, name: str) -> _Found | None:
        tree = self._module(module)
        for node in () if tree is None else _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                if (found := self._imported(module, node, name)) is not None:
                    return found
            elif name in _named(node):
                return _Found(module, node)
        return None

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> _Found | None:
        for alias in node.names:
            if (alias.asname or alias.name) in (name, "*"):
                source = self._imported_from(module, node)
                if source is None:
                    return _Found(module, node) if alias.name != "*" else None  # another package's
                inner = name if alias.name == "*" else alias.name
                whole = f"{source}.{inner}".lstrip(".")
                return self._find(whole) or self._as_module(whole)
        return None

    def _as_module(self, name: str) -> _Found | None:
        tree = self._module(name)
        return None if tree is None else _Found(name, tree)

    def _imported_from(self, module: str, node: ast.ImportFrom) -> str | None:
        if not node.level:
            top, _, inner = (node.module or "").partition(".")
            return inner if top == "vllm" else None
        path = module.split(".") if module else []
        is_package = self._is_package(module)
        path = path[: len(path) - node.level + (1 if is_package else 0)]
        return ".".join([*path, *filter(None, [node.module])])

    def _is_package(self, module: str) -> bool:
        path = "/".join(("vllm", *filter(None, module.split("."))))
        return self._text(f"{path}.py") is None

    # Classes.

    def _lineage(self, found: _Found) -> Iterator[_Found]:
        """A class and those it inherits from, as far as they are vLLM's."""
        yield found
        if isinstance(found.node, ast.ClassDef):
            for base in found.node.bases:
                name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
                if name != found.node.name and (parent := self._in_module(found.module, name)):
                    yield from self._lineage(parent)

    def _method(self, owner: _Found, name: str) -> _Found | None:
        if not name:
            return owner
        for kind in self._lineage(owner):
            if isinstance(kind.node, ast.Module):
                return self._in_module(kind.module, name)
            for node in _statements(getattr(kind.node, "body", [])):
                if isinstance(node, _Definition) and node.name == name:
                    return _Found(kind.module, node)
        return None

    def _attributes(self, owner: _Found) -> set[str]:
        if isinstance(owner.node, ast.Module):
            return {name for node in _statements(owner.node.body) for name in _named(node)}
        return {name for kind in self._lineage(owner) for name in _of_instances(kind.node)}


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Also those under a condition, such as ``if TYPE_CHECKING``."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _statements(getattr(node, inner, []))


def _bound(node: ast.AST) -> set[str]:
    """Names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    found = (inner for one in targets if one is not None for inner in ast.walk(one))
    return {one.id for one in found if isinstance(one, ast.Name)}


def _named(node: ast.stmt) -> set[str]:
    if isinstance(node, _Definition):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return _bound(node)


@functools.cache
def _of_instances(kind: ast.AST) -> frozenset[str]:
    """What a class has: its methods and fields, and what they assign to ``self``."""
    names = {name for node in _statements(getattr(kind, "body", [])) for name in _named(node)}
    for node in ast.walk(kind):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                names.add(node.attr)
    return frozenset(names)


def _otherwise(found: _Found, expected: str) -> str:
    """How parameters differ; nothing where they do not."""
    if not isinstance(found.node, _FUNCTIONS):
        return ""
    given = found.node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names = [one for one in names if one not in ("self", "cls")]
    wanted, open_end = expected.removesuffix(MORE).split(), expected.endswith(MORE)
    if (names[: len(wanted)] if open_end else names) == wanted:
        return ""
    return f"takes ({', '.join(names)}), expected ({', '.join(expected.split())})"


def _first_missing(source: str, texts: Sequence[str]) -> str | None:
    at = 0
    for text in texts:
        found = source.find(text, at)
        if found < 0:
            return text
        at = found + len(text)
    return None
