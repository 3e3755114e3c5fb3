"""What a search through the names finds: files, classes, functions and what they say first."""

import ast
import re
from collections import Counter

NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
IN_THE_PATH = 10
"""Hits that a file's own name is worth: it is read before anything inside."""


def names(source, module):
    """Every name of a file with its docstring's first line, as a search would print them."""
    yield _first_line(module.tree)
    for node in ast.walk(module.tree):
        if isinstance(node, NAMED):
            keyword = "class" if isinstance(node, ast.ClassDef) else "def"
            yield f"{keyword} {node.name}: {_first_line(node)}"


def _first_line(node):
    return (ast.get_docstring(node) or "").partition("\n")[0]


def places(source, *words):
    """The files in which all words come together, those with the most hits first.

    Words are regular expressions without case; a space in them is any separator or none. They come
    together where one line has all of them, the file's path being a part of every line.
    """
    patterns = [re.compile(word.replace(" ", "[ _-]?"), re.IGNORECASE) for word in words]
    hits = Counter()
    for module in source.modules.values():
        path = source.label(module)
        if all(pattern.search(path) for pattern in patterns):
            hits[path] += IN_THE_PATH
        else:
            hits[path] += sum(
                all(pattern.search(f"{path}:{name}") for pattern in patterns)
                for name in names(source, module)
            )
    return [
        path for path, number in sorted(hits.items(), key=lambda hit: (-hit[1], hit[0])) if number
    ]
