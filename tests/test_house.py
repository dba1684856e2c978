"""The house itself: rooms that do not import each other in a circle, and nothing too large in them.

What a rule of thumb is worth depends on the exceptions, so they are named here.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mechanic"
LONGEST_FILE, LONGEST_FUNCTION, MOST_ATTRIBUTES = 450, 50, 12

RECORDS = {
    "History",  # what a process has written of one optimizer
    "Run",  # a line of a CSV file, whose fields are its columns
}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


def imports(name: str) -> Iterator[str]:
    """The modules that a module needs when it is imported, or for its types."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_two_modules_import_each_other() -> None:
    faces = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    graph = {
        name: {other for other in imports(name) if other in MODULES and other not in faces}
        for name in MODULES
        if name not in faces
    }
    TopologicalSorter(graph).prepare()  # raises where there is a circle


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_too_large(name: str) -> None:
    assert len(MODULES[name].read_text("utf-8").splitlines()) <= LONGEST_FILE
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            assert node.end_lineno is not None
            code = node.end_lineno - first.lineno + 1
            assert code <= LONGEST_FUNCTION, f"{node.name} has {code} lines of code"
        if isinstance(node, ast.ClassDef) and node.name not in RECORDS:
            found = attributes(node)
            assert len(found) <= MOST_ATTRIBUTES, f"{node.name} has {sorted(found)}"


def attributes(node: ast.ClassDef) -> set[str]:
    """What an object of a class holds: its fields, and what is assigned to `self`."""
    fields = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    assigned = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    return fields | assigned


def test_the_map_names_every_room() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    of_torch = ("torch", "torch/kernels", "torch/native")
    for folder in (*of_torch, "optax", "run", "bench", "integrations"):
        folder = f"mechanic/{folder}"
        section = page.split(f"### `{folder}/`")[1].split("\n## ")[0].split("\n### ")[0]
        for path in (ROOT / folder).glob("*.py"):
            if path.name not in ("__init__.py", "__main__.py"):
                assert f"`{path.name}`" in section, f"{folder}/{path.name} is not on the map"
