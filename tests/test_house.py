"""The house: imports run launch -> pipeline -> model, rooms stay small, heavy libraries stay out of light paths."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipeline.contract.stages import STAGES

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


def room_of(file):
    """What a newcomer sees as one place: model, launch, a folder of pipeline, a file beside those folders."""
    return "/".join(file.parts[:2]) if file.parts[0] == "pipeline" else file.parts[0]


def arrows():
    """(importing room, imported room) over the whole house."""
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)] \
                if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                file = Path(name.replace(".", "/")).with_suffix(".py")
                if (REPOSITORY / file).is_file():
                    found.add((room_of(path.relative_to(REPOSITORY)), room_of(file)))
    return {(start, end) for start, end in found if start != end}


def test_no_imports_between_rooms_run_in_a_circle():
    left = arrows()
    while ends := {start for start, _ in left} and {end for _, end in left} - {start for start, _ in left}:
        left = {(start, end) for start, end in left if end not in ends}
    assert not left, "each of these rooms is imported by one that it imports, directly or not"


def test_the_rooms_are_less_entangled_than_the_first_version_was():
    assert len(arrows()) < 161


CALLED_FROM_OUTSIDE = {
    "register_stage",  # by plugins
    "initialise",  # by who uses the network alone
    "loglikelihood_rolling", "generate_until",  # by lm_eval
    "affinity",  # by submitit
}


def test_nothing_is_there_for_tests_only():
    """Every function and class is named somewhere else in the house than where it is defined."""
    named, defined = Counter(CALLED_FROM_OUTSIDE), {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if not node.decorator_list or node.name.startswith("test"):  # a decorator may hand it to somebody
                    defined.setdefault(node.name, path.relative_to(REPOSITORY))
            elif isinstance(node, ast.Name | ast.Attribute):
                named[node.id if isinstance(node, ast.Name) else node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
                named.update(re.findall(r"\w+", node.value))  # "module:function", "{name}_{kind}"
    cases = {name for name in defined if name.startswith("_") and defined[name].name == "gpu_cases.py"}  # f"_{case}"
    assert {name: str(path) for name, path in defined.items()
            if not name.startswith("__") and not named[name] and name not in cases} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 400


def test_rooms_stay_small():
    counts = Counter(path.parent for path in FILES)
    assert {str(room): count for room, count in counts.items() if count > 25} == {}


def test_what_the_launcher_reads_of_training_needs_no_torch():
    code = ("import importlib, pkgutil, sys; import pipeline.contract, pipeline.records, launch.run_status; "
            "[importlib.import_module(f'{room.__name__}.{module.name}') for room in "
            "(pipeline.contract, pipeline.records, launch.run_status) "
            "for module in pkgutil.iter_modules(room.__path__)]; print('torch' in sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_the_code_of_every_stage_is_where_its_table_says(stage):
    assert all((REPOSITORY / entry).exists() for entry in stage.code)
    assert Path(f"pipeline/{stage.name}.py") in stage.source_files()


def test_a_training_rank_needs_only_torch_numpy_pyarrow_and_the_config_library():
    """Importing all that training uses must not load the libraries of the other stages."""
    code = ("import sys; import pipeline.training.session; "
            "print([name for name in ('datasets', 'transformers', 'lm_eval', 'sentencepiece', 'tokenizers', "
            "'tiktoken', 'webdataset', 'matplotlib', 'jinja2', 'submitit', 'deepspeed', 'safetensors', 'tensorboard', "
            "'wandb', 'mlflow') if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
