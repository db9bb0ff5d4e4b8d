"""Submitit and webdataset are used by their public names."""

import ast
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

ROOMS = ("launch", "pipeline", "tools", "model", "benchmarks")


def names_of(library: str) -> set[str]:
    """The names that our code takes from a library, with their modules, and all attributes in the files that do."""
    names = set[str]()
    for path in (path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))):
        tree = ast.parse(path.read_text())
        taken = set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                taken |= {name.name for name in node.names if name.name.split(".")[0] == library}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
                taken |= {f"{node.module}.{name.name}" for name in node.names}
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if taken:
            names |= taken | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                              and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))} - own
    return names


@pytest.mark.parametrize(("library", "used"), [
    ("submitit", {"submitit.SlurmExecutor", "submitit.JobEnvironment", "submitit.helpers.Checkpointable"}),
    ("webdataset", set())])
def test_no_private_name_of_a_library_is_used(library, used):
    names = names_of(library)
    assert used <= names and names
    private = {name for name in names if any(part.startswith("_") and not part.startswith("__")
                                             for part in Path(name).name.split("."))}
    assert not private


@pytest.mark.parametrize("library", ["submitit", "webdataset"])
def test_no_class_of_a_library_is_changed(library):
    """Only `Checkpointable` is there to be derived from."""
    derived = set[str]()
    for path in (path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))):
        tree = ast.parse(path.read_text())
        taken = {name.asname or name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                 and (node.module or "").split(".")[0] == library for name in node.names}
        derived |= {base.id for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases
                    if isinstance(base, ast.Name) and base.id in taken}
    assert derived <= {"Checkpointable"}
