"""No module of ours may hide one that somebody else imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.contract.stages import REPOSITORY, STAGES

STAGE_NAMES_THAT_ARE_LIBRARIES = {"evaluate"}
"""A library that lm_eval imports; the stage's name is fixed, and the start of every script keeps it safe."""


def test_no_module_has_the_name_of_a_library():
    ours = {path.stem for folder in ("launch", "pipeline") for path in (REPOSITORY / folder).iterdir()
            if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"}
    assert {"submit", "contract", "config"} <= ours
    assert not ours & set(sys.stdlib_module_names)
    installed = {name: packages for name, packages in metadata.packages_distributions().items()
                 if packages != ["drover"]}
    assert {name: installed[name] for name in (ours & set(installed)) - STAGE_NAMES_THAT_ARE_LIBRARIES} == {}


@pytest.mark.parametrize("script", ["launch/submit.py", "launch/status.py",
                                    *(f"pipeline/{name}.py" for name in STAGES)])
def test_a_script_puts_the_repository_first_on_the_path(script, monkeypatch):
    """Before it imports anything but the standard library. Python itself puts the script's own folder there."""
    path = REPOSITORY / script
    statements = ast.parse(path.read_text()).body
    first = next(number for number, statement in enumerate(statements) if isinstance(statement, ast.If))
    imported = [getattr(statement, "module", None) or statement.names[0].name for statement in statements[:first]
                if isinstance(statement, ast.Import | ast.ImportFrom)]
    assert {name.partition(".")[0] for name in imported} <= {"__future__", *sys.stdlib_module_names}
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    start = compile(ast.Module(statements[:first + 1], []), str(path), "exec")
    exec(start, {"__name__": "tried", "__package__": None, "__file__": str(path)})  # noqa: S102
    assert Path(sys.path[0]) == REPOSITORY


def test_evaluate_starts_beside_the_library_of_its_name(tmp_path):
    result = subprocess.run([sys.executable, str(REPOSITORY / "pipeline" / "evaluate.py"), "--help"], cwd=tmp_path,
                            capture_output=True, text=True, check=True)
    assert "Run the stage evaluate" in result.stdout
