"""The tutorial on experiments does what it says, with fewer seeds and steps and less text."""

import json

import pytest
import yaml

from tests.conftest import write_config
from tests.pages import checkout, commands, files, typed, warm_stages

pytestmark = pytest.mark.slow
PAGE = "tutorial-experiments"
SMALLER = {"seeds": [0, 1], "vary": {"train.lr": [0.005, 0.01]}}


@pytest.fixture(scope="module")
def home(tmp_path_factory, corpus):
    folder = warm_stages(checkout(tmp_path_factory.mktemp("home")))
    write_config(folder, corpus, name="demo", runs_dir="runs").rename(folder / "configs/demo.yaml")
    for name, text in files(PAGE).items():
        config = yaml.safe_load(text)
        (folder / name).write_text(yaml.safe_dump({**config, **SMALLER} if "seeds" in config else {
            **config, "train": {**config["train"], "steps": 12}}))
    return folder


def test_every_command_runs_and_added_variants_leave_finished_runs_alone(home):
    sweep, status, copy, again = commands(PAGE)
    first = typed(sweep, home)
    assert first.returncode == 0, first.stdout + first.stderr
    assert all(part in first.stdout for part in ("Noise floor: 0.", "lr-0.005: ", "page      runs/rates/sweep.html"))
    made = {path: path.stat().st_mtime_ns for path in home.glob("runs/rates/*/*/manifest.json")}
    assert len(made) == 4 * 4, "train, convert, evaluate, report"
    result = json.loads(typed(status, home).stdout)
    assert [row["variant"] for row in result["variants"]] == ["lr-0.01", "lr-0.005"]
    assert typed(copy, home).returncode == 0 == (added := typed(again, home)).returncode, added.stdout
    assert "6 of 6 runs done" in added.stdout and added.stderr.count(": done in") == 2
    assert {path: path.stat().st_mtime_ns for path in made} == made
