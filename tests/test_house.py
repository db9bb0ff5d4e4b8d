"""The house: imports run launch -> pipeline -> model, heavy libraries stay out of light paths."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from drover.pipeline.contract.stages import STAGES
from tests.conftest import run_python
from tests.refusal import table

REPOSITORY = Path(__file__).resolve().parents[1]
FLOORS = {"model": {"model"}, "pipeline": {"model", "pipeline"}, "launch": {"model", "pipeline", "launch"}}
KINDS = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.FunctionDef, ast.ClassDef, ast.Name, ast.Constant)
COMMANDS = REPOSITORY / "drover" / "__main__.py"
FILES = [path for floor in (*FLOORS, "tools", "benchmarks") for path in sorted((REPOSITORY / floor).rglob("*.py"))]


@cache
def nodes_of(path):
    """The nodes of a file's syntax tree that the tests here look at (KINDS)."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, KINDS)]


def imported(path):
    """The names that a file imports, as the house has them: pipeline.files for drover.pipeline.core.files."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("drover.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}".removeprefix("drover.") for alias in node.names)


def module_of(path):
    """What the file is imported as."""
    name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    return name if name.startswith("benchmarks") else f"drover.{name}"


def test_everything_is_imported_as_a_part_of_drover():
    """Two names for one module would be two modules."""
    assert [path for path in FILES if re.search(r"^\s*(from|import) (model|pipeline|launch|tools)\b", path.read_text(),
                                                re.MULTILINE)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_imports_never_run_upwards(path):
    floor = path.relative_to(REPOSITORY).parts[0]
    ours = {top for name in imported(path) if (top := name.partition(".")[0]) in (
        "model", "pipeline", "launch", "tools", "tests", "benchmarks")}
    assert ours <= FLOORS.get(floor, {"model", "pipeline", "launch", floor})


UNPICKLES = re.compile(r"pickle\.(load|Unpickler)|from pickle|\.\w*(gather|scatter|broadcast|send|recv)_object|"
                       r"^torch\.load\((?!.*weights_only=True)")


def test_nothing_unpickles_what_others_have_written():
    """Nor has torch do it. A stage's worker looks whether an error of its own can be sent to its parent. Of torch's
    lists of checkpoints only torch's own classes are made."""
    found = {(str(path.relative_to(REPOSITORY)), match[0])
             for path in FILES for node in nodes_of(path)
             if isinstance(node, ast.Attribute | ast.Call | ast.ImportFrom)
             and (match := UNPICKLES.search(ast.unparse(node)))}
    assert found == {("pipeline/contract/workers.py", "pickle.load"), ("pipeline/formats/dcp.py", "pickle.Unpickler")}


DURABLE = re.compile(r"os\.(fsync|rename|replace)\(|fcntl\.flock\(|\.rename\(")


def test_one_module_renames_locks_and_waits_for_the_disk():
    """So what a power cut or a kill may leave is decided there."""
    assert {str(path.relative_to(REPOSITORY)) for path in FILES if DURABLE.search(path.read_text())} == {
        "pipeline/core/files.py"}


def room_of(file):
    """What a newcomer sees as one place: model, launch, a folder of pipeline, the stages beside those folders."""
    return "/".join(file.parts[:2]).removesuffix(f"/{file.name}") if file.parts[0] == "pipeline" else file.parts[0]


@cache
def arrows():
    """(importing room, imported room) over the whole house."""
    found = set()
    for path in FILES:
        for name in imported(path):
            for known in (name, name.rpartition(".")[0]):
                file = Path(f"{known.replace('.', '/')}.py")
                if (REPOSITORY / file).is_file():
                    found.add((room_of(path.relative_to(REPOSITORY)), room_of(file)))
    return {(start, end) for start, end in found if start != end}


BY_THE_USER = {"pipeline/contract/signed.py": "a secret, which others on the machine would read on a command line"}
"""Files of the stages that read a variable of ours, with the reason."""


def test_stages_are_steered_by_arguments_and_not_by_variables():
    """What a stage knows of its job is in `pipeline/contract/state.py`."""
    reading = {str(path.relative_to(REPOSITORY)) for room in ("pipeline", "model")
               for path in (REPOSITORY / room).rglob("*.py") if "DROVER_" in path.read_text()}
    assert reading == set(BY_THE_USER)


def test_no_imports_between_rooms_run_in_a_circle():
    left = arrows()
    while ends := {start for start, _ in left} and {end for _, end in left} - {start for start, _ in left}:
        left = {(start, end) for start, end in left if end not in ends}
    assert not left, "each of these rooms is imported by one that it imports, directly or not"


def imported_files(path):
    """The files of the house that a file imports, also inside of functions, but not for type checkers alone."""
    tree = ast.parse(path.read_text())
    branches = [node for node in ast.walk(tree)
                if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_checkers = {id(part) for branch in branches for part in ast.walk(branch)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_checkers:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                for known in (name, node.module):
                    file = REPOSITORY / f"{known.removeprefix('drover.').replace('.', '/')}.py"
                    if file.is_file():
                        yield file
                        break


def test_no_imports_between_files_run_in_a_circle():
    left = {path: set(imported_files(path)) for path in FILES}
    while ends := [path for path, needed in left.items() if not needed & left.keys()]:
        for path in ends:
            del left[path]
    assert not left, "each of these files imports another of them"


def test_the_rooms_are_less_entangled_than_the_first_version_was():
    assert sum(start != "benchmarks" for start, _ in arrows()) < 100


def test_names_of_modules_in_texts_stand_in_one_registry():
    """And in the network, which knows nothing of the pipeline; and in the table of commands."""
    assert {str(path.relative_to(REPOSITORY)) for path in [*FILES, COMMANDS]
            if re.search(r"\"(drover|model|pipeline|launch|tools)\.[\w.]+:\w+\"", path.read_text())} == {
        "pipeline/config/shipped.py", "model/attention/__init__.py", "drover/__main__.py"}


CALLED_FROM_OUTSIDE = {
    "register_stage",  # by plugins
    "initialise",  # by who uses the network alone
    "loglikelihood_rolling", "generate_until",  # by lm_eval
    "seekable",  # by io.BufferedReader
    "get_field", "format_field",  # by string.Formatter
}


def test_nothing_is_there_for_tests_only():
    """Every function and class is named somewhere else in the house than where it is defined."""
    named, defined = Counter(CALLED_FROM_OUTSIDE), {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if not node.decorator_list or node.name.startswith("test"):  # a decorator may hand it to somebody
                    defined.setdefault(node.name, path.relative_to(REPOSITORY))
            elif isinstance(node, ast.Name | ast.Attribute):
                named[node.id if isinstance(node, ast.Name) else node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
                named.update(re.findall(r"\w+", node.value))  # "module:function", "{name}_{kind}"
    assert {name: str(path) for name, path in defined.items()
            if not name.startswith("__") and not named[name]} == {}


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_the_code_of_every_stage_is_where_its_table_says(stage):
    assert all((REPOSITORY / entry).exists() for entry in stage.code)
    assert Path(f"pipeline/{stage.name}.py") in stage.source_files()


HEAVY = {"torch", "torch._dynamo", "transformers", "datasets", "lm_eval", "deepspeed", "pyarrow", "pandas", "numpy",
         "tokenizers", "sentencepiece", "tiktoken", "matplotlib", "jinja2", "submitit", "tensorboard",
         "webdataset"}
CONFIG = REPOSITORY / "configs" / "demo.yaml"
NO_RUN = "error: There is no run nope. The runs in runs are: none."
REFUSED = {program: (arguments, said) for program, arguments, said in table(f"""
    launch/submit.py -> --stage nope --config {CONFIG} -> nope
    launch/status.py -> --run nope -> {NO_RUN}
    drover.pipeline.storage -> file:///nope -> required: folder
    benchmarks.train -> --only nope -> invalid choice: 'nope'
    benchmarks.gpu -> --only nope -> invalid choice: 'nope'
    benchmarks.data -> --vocab x -> invalid int value: 'x'
    benchmarks.sizes -> --files x -> invalid int value: 'x'
    drover.pipeline.watch -> nope -> {NO_RUN}
    drover.tools.audit -> nope -> {NO_RUN}
    drover.tools.chat -> nope x -> {NO_RUN}
    drover.tools.classifier -> train --good x --bad x --out {CONFIG} -> exists already
    drover.tools.compare -> ./nope --tasks nope -> --tasks names nope
    drover.tools.copy_tokens -> nope --to file:///nope -> {NO_RUN}
    drover.tools.export_tokens -> --run nope --out x -> {NO_RUN}
    drover.launch.doctor -> --write {CONFIG} -> exists already
    drover.tools.init -> nope -> nope is no folder
    drover.tools.presets -> nope -> There is no preset 'nope'
    drover.tools.rehearse -> --config {CONFIG} --ranks 3 -> cannot be rehearsed on 3 ranks
    drover.tools.verify -> nope -> {NO_RUN}
    drover.tools.tasks -> list nope -> The command names nope, but there is no such task
    drover.tools.weights -> nope --to x --format hf -> {NO_RUN}
    drover.tools.trace -> nope --step 1 -> {NO_RUN}""")}
"""Of each program, wrong arguments and what is said of them."""
REFUSED |= {f"drover.pipeline.{name}": (f"--config {CONFIG} runs_dir=nope train.lr=x", "train.lr") for name in STAGES}
NEEDED = {"drover.pipeline.tokenizer": {"numpy"}, "drover.pipeline.encode": {"numpy"},
          **{f"benchmarks.{name}": {"numpy", "torch"} for name in ("data", "gpu", "sizes", "train")}}
"""What these programs import before they look at their arguments."""


def imported_by(*command, cwd):
    """The exit status of a Python command, what it said, and the libraries that it imported."""
    result = run_python("-X", "importtime", *command, cwd=cwd, check=False)
    lines = result.stderr.splitlines()
    modules = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    return result.returncode, result.stdout + "\n".join(said), modules


PAGE = (REPOSITORY / "docs/architecture.md").read_text()


DOCUMENTED = {"_exit", "_current_frames", "_getframe", "_replace"}
"""Names of Python that its documentation has."""


def private_names():
    """Names with an underscore that the house takes from libraries: those that it neither defines nor imports from
    itself."""
    trees = [ast.parse(path.read_text()) for path in [*FILES, COMMANDS]]
    own, used = set(), set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.Import(names=names):
                used.update(part for alias in names for part in alias.name.split("."))
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("drover"):
                used.update([*module.split("."), *(alias.name for alias in names)])
    return {name for name in used - own - DOCUMENTED if name.startswith("_") and not name.startswith("__")}


def test_every_private_name_of_a_library_is_on_the_page():
    rows = re.findall(r"^\| (`_[^|]*) \|", (REPOSITORY / "docs/private-names.md").read_text(), re.MULTILINE)
    assert private_names() == set(re.findall(r"`(_\w+)`", " ".join(rows)))


def lines_of(path, name):
    """How many lines a definition has, its decorators included."""
    node = ast.parse(path.read_text())
    for part in name.split("."):
        node = next(one for one in node.body if getattr(one, "name", "") == part)
    return node.end_lineno + 1 - min(one.lineno for one in [node, *node.decorator_list])


def test_the_path_through_the_code_takes_an_hour():
    rows = re.findall(r"^\| (.*) \| `(\S+\.py)` \|", (REPOSITORY / "docs/read-in-an-hour.md").read_text(), re.MULTILINE)
    lines = [lines_of(REPOSITORY / file, name) for names, file in rows for name in re.findall(r"`([\w.]+)`", names)]
    whole_files = [len((REPOSITORY / file).read_text().splitlines()) for names, file in rows if names == "all"]
    assert len(lines) > 15 and 600 < sum(lines) + sum(whole_files) <= 1200


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\b(?:model|pipeline|launch|tools|tests|drover)/[\w/]+\.py",
                                                       PAGE))))
def test_a_file_on_the_page_about_the_architecture_exists(name):
    assert (REPOSITORY / name).is_file()


def test_the_way_from_the_command_to_a_rank_is_short():
    drawing, = re.findall(r"^your shell .*?```", PAGE, re.MULTILINE | re.DOTALL)
    drawn = re.findall(r"^.{15}((?:launch|pipeline)/[\w/]+\.py)", drawing, re.MULTILINE)
    assert len(set(drawn)) == 8 and drawn[0] == "launch/submit.py" and drawn[-1] == "pipeline/train.py"


def test_every_program_has_a_wrong_argument_here():
    programs = {module_of(path).removesuffix(".__main__") for path in FILES
                if re.search(r"= Program\(\"python|ArgumentParser\(prog", text := path.read_text(), re.MULTILINE)
                and "__main__" in text}
    scripts = {"drover.launch.submit": "launch/submit.py", "drover.launch.status": "launch/status.py"}
    internal = {"drover.launch.job.rank"}
    stages = {f"drover.pipeline.{name}" for name in STAGES}  # whose arguments are looked at elsewhere
    assert {scripts.get(name, name) for name in programs} - internal == REFUSED.keys() - stages


@pytest.mark.parametrize("program", REFUSED)
def test_refusals_import_nothing_heavy(program, tmp_path):
    """Nor does --help, which imports less: a wrong argument is refused after arguments are parsed."""
    start = [str(REPOSITORY / program)] if program.endswith(".py") else ["-m", program]
    arguments, said = REFUSED[program]
    status, text, modules = imported_by(*start, *arguments.split(), cwd=tmp_path)
    assert (status, said in text) == (2, True), text
    assert modules & HEAVY <= NEEDED.get(program, set())
    assert not list(tmp_path.iterdir())


def all_of(*rooms):
    """An import of every module of these packages."""
    return "import " + ", ".join(module_of(path) for room in rooms for path in sorted((REPOSITORY / room).glob("*.py")))


@pytest.mark.parametrize(("code", "needed"), [
    ("from drover.pipeline.config.loading import load_config; load_config('configs/demo.yaml')", set()),
    ("import sys; from drover.pipeline.contract.stages import STAGES; "
     "from drover.pipeline.config.loading import load_config; "
     "[stage.input_files(load_config('configs/demo.yaml')) for stage in STAGES.values()]", set()),
    ("from drover.tools.presets import main; main(['llama3_8b'])", set()),
    ("import drover.launch.job.rank", set()),
    ("import drover.tools.verify, drover.tools.trace.__main__", set()),
    (all_of("pipeline/contract", "pipeline/records") + ", drover.launch.run_status", set()),
    ("import drover.tools.audit, drover.pipeline.training.data, drover.tools.trace.tracing", {"numpy"}),
    ("import drover.pipeline.encode", {"numpy"}),  # which its workers import
    ("import drover.pipeline.training.set_up", {"torch", "numpy"}),
    (all_of("pipeline/reporting"), {"numpy", "jinja2"}),
    ("import torch; from drover.model.attention.backend import Where, choose; "
     "from drover.model.config import ModelConfig; "
     "from drover.model.names import parameter_shapes; "
     "parameter_shapes(ModelConfig(dim=8, layers=1, heads=1, kv_heads=1, vocab_size=8)); "
     "choose('auto', Where(torch.device('cpu'), torch.bfloat16, compiled=False, head_dim=8))", {"torch", "numpy"}),
])
def test_imports_take_in_only_what_is_needed(code, needed):
    status, text, modules = imported_by("-c", code, cwd=REPOSITORY)
    assert status == 0, text
    assert modules & HEAVY <= needed


@pytest.mark.parametrize("code", [
    "import drover.model, drover.launch.job.rank", "import drover.pipeline.report, drover.pipeline.encode",
    "import drover.launch.job.task"])
def test_workers_and_ranks_start_without_the_configuration(code):
    status, text, modules = imported_by("-c", code, cwd=REPOSITORY)
    assert status == 0, text
    assert not modules & {"pydantic", "yaml"}
