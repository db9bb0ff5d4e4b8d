"""Docs are code: every command of README and docs runs, in order, on a miniature of the demo, as a new user gives them.

`make test` runs the first command, the whole chain, and tests its run. The other commands are slow.
Commands after `<!-- needs a cluster -->` and `<!-- takes minutes -->` are not run, those after `<!-- needs torchao -->`
where it is installed; those of `make` are checked against the Makefile.
"""

import re
import shutil
from importlib.util import find_spec

import pytest

from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import read_json
from drover.pipeline.records.metrics import read_metrics
from tests.conftest import REPOSITORY, write_config
from tests.data.source_files import COMPRESS, lines
from tests.pages import checkout, commands, files, typed, warm_stages

README = (REPOSITORY / "README.md").read_text()
HAVE_TESTS = {"after-pretraining", "extending", "weights", "evaluation", "generation", "tutorial-crawl", "tutorial-web",
              "tutorial-tinystories", "tutorial-export", "tutorial-experiments", "tutorial-ladder", "tutorial-mixture",
              "data", "tokens", "machines"}
"""Pages with tests of their own."""
PAGES = ["../README", *sorted({path.stem for path in (REPOSITORY / "docs").glob("*.md")} - HAVE_TESTS)]
COMMANDS = dict.fromkeys(commands(*PAGES, needs=["torchao"] if find_spec("torchao") else []))
INSPECT = " --inspect"
"""TensorBoard then prints what it would show, and serves nothing."""
WHOLE_CHAIN, *OTHERS = [command + INSPECT * command.startswith("tensorboard") for command in COMMANDS
                        if not command.startswith("make ")]


@pytest.fixture(scope="module")
def home(tmp_path_factory, corpus):
    """A folder that looks like the checkout, with miniature configurations under the README's names."""
    folder = warm_stages(checkout(tmp_path_factory.mktemp("home")))
    shutil.copytree(REPOSITORY / "configs/tasks", folder / "configs/tasks")
    texts = sorted(corpus.glob("*.txt"))
    shutil.copytree(corpus, folder / "text")
    shutil.move(folder / "text" / texts[0].name, folder / "text/argparse.py")  # which a command looks up
    path = write_config(folder, folder / "text", name="demo", runs_dir="runs",
                        evaluate={"tasks": ["python_line"], "prompts": None},
                        shard={"sources": [{"kind": "files", "name": "code", "paths": [f"{folder}/text/*"]}]},
                        train={"steps": 30, "warmup_steps": 5, "validation_every": 10, "micro_batch": 8})
    path.rename(folder / "configs/demo.yaml")
    (folder / "configs/mine.yaml").write_text(files("../README")["configs/mine.yaml"])
    (folder / "data/notes/deep").mkdir(parents=True)
    for file in texts[::2]:
        shutil.copy(file, folder / "data/notes/deep" / file.name)
    (folder / "data/web").mkdir()
    (folder / "data/web/part.jsonl.zst").write_bytes(COMPRESS[".zst"](
        lines({"content": file.read_text()} for file in texts[1::2])))
    return folder


@pytest.fixture(scope="module")
def demo(home):
    """Result of the README's first command, and its run's folder."""
    return typed(WHOLE_CHAIN, home), home / "runs/demo"


@pytest.fixture(scope="module")
def outcomes(home, demo):
    """The result of every other command, in the README's order."""
    return {command: typed(command, home) for command in OTHERS}


def test_the_readme_has_the_promised_commands():
    text = "\n".join(COMMANDS)
    for needed in ("make demo", "make test", "drover run", "--stage train --nodes 4", "torchrun", "tensorboard"):
        assert needed in text


@pytest.mark.slow
@pytest.mark.parametrize("command", OTHERS)
def test_every_command_runs(outcomes, command):
    result = outcomes[command]
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_make_knows_its_targets():
    targets = "setup demo test test-all soak lint matrix picture docs"
    assert typed(f"make -n {targets}", REPOSITORY).returncode == 0


def test_make_demo_runs_the_first_command_of_the_readme():
    output = typed("make -n demo", REPOSITORY).stdout
    assert "launch/submit.py --stage all configs/demo.yaml --cluster local" in output
    assert "drover run configs/demo.yaml --cluster local" in README


def test_the_first_run_ends_with_a_report(demo):
    result, folder = demo
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stdout + result.stderr
    assert WHOLE_CHAIN == "drover run configs/demo.yaml --cluster local"
    assert result.stdout.rstrip().endswith("report: runs/demo/report.html")
    overall = read_json(folder / "evaluate/results.json")["validation"]["overall"]
    assert f"{overall['bits_per_byte']:.3f}" in (folder / "report.html").read_text()
    metrics = read_metrics(folder / "train/metrics.jsonl")
    assert metrics[-1]["loss"] < 0.75 * metrics[0]["loss"]
    assert overall["bits_per_byte"] < 0.95 * overall["baselines"]["unigram"]


def test_a_second_run_is_up_to_date_at_once(demo, home):
    _, folder = demo
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    result = typed(WHOLE_CHAIN, home)
    assert result.returncode == 0 and result.stdout.count("up to date") == len(STAGES)
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert before == after


@pytest.mark.slow
def test_prompts_are_beginnings_of_the_own_text(outcomes, home, corpus):
    texts = [" ".join(file.read_text().split()) for file in corpus.glob("*.txt")]
    made = read_json(home / "runs/mine/evaluate/results.json")["continuations"]
    assert made and all(any(text.startswith(one["prompt"]) for text in texts) for one in made)


@pytest.mark.slow
def test_the_trial_reuses_the_demo_without_a_copy(outcomes, home):
    assert sorted(path.name.partition(".out")[0] for path in (home / "runs/trial").glob("[!.]*")) == \
        ["config.yaml", "convert", "events", "launch", "logs", "train"]


@pytest.mark.slow
def test_tensorboard_shows_the_curves_of_the_runs(outcomes):
    [shown] = [result.stdout for command, result in outcomes.items() if command.endswith(INSPECT)]
    for tag in ("train/loss", "train/lr", "train/norm_of_gradient", "validation/sample/bits_per_byte/code"):
        assert re.search(rf"^ *{tag}$", shown, re.MULTILINE), shown
