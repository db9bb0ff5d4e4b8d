"""What the house imports from submitit and webdataset, all of it public, and derives from them."""

import ast

from tests.conftest import REPOSITORY

LIBRARIES = ("submitit", "webdataset")
TREES = [ast.parse(path.read_text()) for room in ("launch", "pipeline", "tools", "model", "benchmarks")
         for path in sorted((REPOSITORY / room).rglob("*.py"))]


def imports(tree: ast.Module) -> dict[str, str]:
    """The names that a module takes from these libraries, with where they come from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name: name.name for name in node.names if name.name.split(".")[0] in LIBRARIES}
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES:
            found |= {name.name: f"{node.module}.{name.name}" for name in node.names}
    return found


def test_imports():
    taken = {name for tree in TREES for name in imports(tree).values()}
    assert {name for name in taken if name.startswith("submitit")} == {
        "submitit.JobEnvironment", "submitit.SlurmExecutor", "submitit.core.utils.JobPaths",
        "submitit.helpers.Checkpointable", "submitit.helpers.DelayedSubmission", "submitit.helpers.clean_env",
        "submitit.helpers.environment_variables"}
    assert taken and not [name for name in taken if "._" in name]


def test_only_what_is_meant_to_be_derived_from_is():
    bases = {base.id for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
             for base in node.bases if isinstance(base, ast.Name) and base.id in imports(tree)}
    assert bases == {"Checkpointable"}
