"""The tutorial on ladders does what it says: its commands, in order, on a ladder that takes a minute."""

import json

import pytest
import yaml

from tests.conftest import MINI, REPOSITORY, merged
from tests.pages import checkout, commands, files, typed, warm_stages
from tests.waiting import HANG_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * HANG_S)]
PAGE, CONFIG = "tutorial-ladder", "configs/experiments/ladder.yaml"


@pytest.fixture(scope="module")
def home(tmp_path_factory, corpus):
    """A folder like the checkout, with a smaller ladder in place of the page's, on a smaller text."""
    folder = warm_stages(checkout(tmp_path_factory.mktemp("ladder")))
    (folder / "configs/experiments").mkdir()
    (folder / CONFIG).write_text(yaml.safe_dump({
        "base": "ladder_base.yaml", "parameters": ["100k", "500k", "1.5M"], "tokens": ["6k", "12k", "24k"],
        "lr": [0.01], "predict": {"parameters": "3M", "tokens": "24k"}}))
    (folder / CONFIG).with_name("ladder_base.yaml").write_text(yaml.safe_dump(merged(MINI, {
        "name": "ladder_base", "shard": {"sources": [{"kind": "files", "name": "code", "paths": [f"{corpus}/*.txt"]}]},
        "train": {"batch_tokens": 256}, "evaluate": {"prompts": []}, "launch": {"processes": 1}})))
    return folder


@pytest.fixture(scope="module")
def outcomes(home):
    """The result of every command of the page, in their order."""
    return {command: typed(command, home) for command in commands(PAGE)}


def test_the_page_shows_the_ladder_that_is_shipped():
    assert yaml.safe_load(files(PAGE)[CONFIG]) == yaml.safe_load((REPOSITORY / CONFIG).read_text())


def test_the_ladder_is_trained_once_and_predicts_what_is_then_measured(home, outcomes):
    planned, trained, again = outcomes.values()
    for command, result in outcomes.items():
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    assert "10 runs, the larger training included" in planned.stdout
    assert trained.stderr.count("-seed0: done in") == 10 and "done in" not in again.stderr
    made = json.loads(again.stdout)
    assert len(made["best"]) == len(made["rungs"]) == 9
    results = [json.loads(path.read_text()) for path in home.glob("runs/ladder/*/evaluate/results.json")]
    measured = {(one["model"]["parameters"], one["validation"]["overall"]["bits_per_byte"]) for one in results}
    assert measured == {*((rung["parameters"], rung["loss"]) for rung in made["rungs"]),
                        (made["target"]["parameters"], made["target"]["measured"])}
    assert made["target"]["lr"] == 0.01 and abs(made["target"]["error"]) < 0.3
    assert made["sentence"] in trained.stdout and "Measured: " in made["sentence"]
    page = (home / "runs/ladder/ladder.html").read_text()
    assert page.count("<svg") == 2 and f"{made['target']['measured']:.4f}" in page
