"""The modules of a package: names, syntax trees, and which of them import which."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file: its dotted name begins with the package's, and ends before `__init__`."""

    name: str
    path: Path
    text: str

    @functools.cached_property
    def tree(self):
        return ast.parse(self.text, filename=str(self.path))

    @property
    def lines(self):
        return len(self.text.splitlines())

    @property
    def package(self):
        """What a relative import counts its dots from."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Source:
    """All modules under the folder of one package; the folder's name is the package's."""

    folder: Path

    @functools.cached_property
    def modules(self):
        """Every module by its dotted name."""
        return {
            module.name: module for module in map(self._read, sorted(self.folder.rglob("*.py")))
        }

    def _read(self, path):
        parts = path.relative_to(self.folder.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        return Module(name=name, path=path, text=path.read_text(encoding="utf-8"))

    def label(self, module):
        """The path below the folder, with slashes."""
        return module.path.relative_to(self.folder).as_posix()

    def imports(self, module):
        """The modules of the package that one imports, wherever in the file it says so.

        `from package import x` is the module `x` if there is one, else the package's `__init__`.
        That Python runs the `__init__` of every package above a module counts for nothing: it is
        the same for all.
        """
        found = {home for home, _ in self.imported_names(module).values()}
        return {name for name in found if name in self.modules and name != module.name}

    @functools.cache  # noqa: B019 # a source lives as long as its process
    def imported_names(self, module):
        """What the imports of a file bind: local name → (module, name in it or None)."""
        bound = {}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound[alias.asname or alias.name] = (self._nearest(alias.name), None)
            elif isinstance(node, ast.ImportFrom):
                home = self._home(module, node)
                for alias in node.names:
                    inner = f"{home}.{alias.name}"
                    is_module = inner in self.modules
                    bound[alias.asname or alias.name] = (
                        (inner, None) if is_module else (self._nearest(home), alias.name)
                    )
        return bound

    def _home(self, module, node):
        if not node.level:
            return node.module or ""
        above = module.package.split(".")
        above = above[: len(above) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])

    def _nearest(self, name):
        """The module of that name, or the one that it would be found in."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name


def circles(imports):
    """Groups of modules that reach each other: `imports` maps each name to those it imports."""
    index, low, stack, found = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return found


def import_circles(source):
    """The circles between the files of a package."""
    return circles({name: source.imports(module) for name, module in source.modules.items()})
