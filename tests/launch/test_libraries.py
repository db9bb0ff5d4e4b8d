"""What the house imports from submitit and webdataset, all of it public."""

import ast

from tests.conftest import REPOSITORY


def test_only_public_names_are_imported():
    names = {f"{node.module}.{name.name}" for room in ("launch", "pipeline", "tools", "model", "benchmarks")
             for path in (REPOSITORY / room).rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("submitit", "webdataset")
             for name in node.names}
    assert {name for name in names if name.startswith("submitit")} == {
        "submitit.JobEnvironment", "submitit.SlurmExecutor", "submitit.helpers.Checkpointable",
        "submitit.helpers.clean_env", "submitit.helpers.environment_variables"}
    assert not [name for name in names if "._" in name]
