"""The house: imports run launch -> pipeline -> model, rooms stay small, heavy libraries stay out of light paths."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.stages import STAGES

REPOSITORY = Path(__file__).resolve().parents[1]
FLOORS = {"model": {"model"}, "pipeline": {"model", "pipeline"}, "launch": {"model", "pipeline", "launch"}}
FILES = [path for floor in (*FLOORS, "tools") for path in sorted((REPOSITORY / floor).rglob("*.py"))]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_imports_never_run_upwards(path):
    floor = path.relative_to(REPOSITORY).parts[0]
    ours = {name for name in imported(path) if name in ("model", "pipeline", "launch", "tools", "tests")}
    assert ours <= FLOORS.get(floor, {"model", "pipeline", "launch", "tools"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_rooms_stay_small(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_the_code_of_every_stage_is_where_its_table_says(stage):
    assert all((REPOSITORY / entry).exists() for entry in stage.code)
    assert Path(f"pipeline/{stage.name}.py") in stage.source_files()


def test_a_training_rank_needs_only_torch_numpy_pyarrow_and_the_config_library():
    """Importing all that training uses must not load the libraries of the other stages."""
    code = ("import sys; import pipeline.training.session; "
            "print([name for name in ('datasets', 'transformers', 'lm_eval', 'sentencepiece', 'tokenizers', "
            "'tiktoken', 'webdataset', 'matplotlib', 'jinja2', 'submitit', 'deepspeed', 'safetensors', 'tensorboard') "
            "if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
