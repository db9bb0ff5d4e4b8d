"""No module of ours may hide one that somebody else imports."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.contract.stages import REPOSITORY, STAGES

STAGE_NAMES_THAT_ARE_LIBRARIES = {"evaluate"}
"""A library that lm_eval imports; the stage's name is fixed, and the start of every script keeps it safe."""


def modules() -> list[str]:
    """Names of the modules and folders directly in launch/ and pipeline/."""
    return sorted({path.stem for folder in ("launch", "pipeline") for path in (REPOSITORY / folder).iterdir()
                   if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"})


def test_no_module_has_the_name_of_a_library() -> None:
    ours = set(modules())
    assert {"submit", "contract", "config"} <= ours
    assert not ours & set(sys.stdlib_module_names)
    installed = {name: packages for name, packages in metadata.packages_distributions().items()
                 if packages != ["drover"]}
    assert {name: installed[name] for name in (ours & set(installed)) - STAGE_NAMES_THAT_ARE_LIBRARIES} == {}


def scripts() -> list[str]:
    """Files that are meant to be run as scripts."""
    return ["launch/submit.py", *(f"pipeline/{name}.py" for name in STAGES)]


@pytest.mark.parametrize("script", scripts())
def test_a_script_puts_the_repository_first_on_the_path(script: str, tmp_path: Path) -> None:
    path = REPOSITORY / script
    # What `python script` does, without its last block: its own folder is first on sys.path until it mends that.
    code = (f"import runpy, sys; sys.path[0] = {str(path.parent)!r}; runpy.run_path({str(path)!r}, run_name='tried');"
            f"print(sys.path[0]); import importlib.util; print(importlib.util.find_spec('evaluate').origin)")
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    first, library = result.stdout.split()[-2:]
    assert Path(first) == REPOSITORY
    assert REPOSITORY / "pipeline" not in Path(library).parents


def test_evaluate_starts_beside_the_library_of_its_name(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, str(REPOSITORY / "pipeline" / "evaluate.py"), "--help"], cwd=tmp_path,
                            capture_output=True, text=True, check=True)
    assert "Run the stage evaluate" in result.stdout
