"""No module of ours may hide one that somebody else imports; and what is imported from submitit and webdataset."""

import ast

import pytest

from drover.pipeline.contract.stages import REPOSITORY, STAGES

START = """
if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
"""


@pytest.mark.parametrize("script", ["launch/submit.py", "launch/status.py",
                                    *(f"pipeline/{name}.py" for name in STAGES)])
def test_a_script_puts_the_repository_first_on_the_path(script):
    """Before it imports anything of ours. Python itself puts the script's own folder there."""
    before, start, after = (REPOSITORY / script).read_text().partition(START)
    assert start and "from drover" in after
    assert not [line for line in before.splitlines() if line.startswith("from drover")]


def test_only_public_names_are_imported():
    names = {f"{node.module}.{name.name}" for room in ("launch", "pipeline", "tools", "model", "benchmarks")
             for path in (REPOSITORY / room).rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("submitit", "webdataset")
             for name in node.names}
    assert {name for name in names if name.startswith("submitit")} == {
        "submitit.JobEnvironment", "submitit.SlurmExecutor", "submitit.helpers.Checkpointable",
        "submitit.helpers.clean_env", "submitit.helpers.environment_variables"}
    assert not [name for name in names if "._" in name]
