"""The search for the best mixture: its file, and a small one to its end by the tutorial's commands."""

import json
import re

import pytest
import yaml

from drover.pipeline.core.errors import UserError
from drover.tools.mixture import MixtureFile, drawn, read_mixture
from tests.conftest import MINI, merged
from tests.pages import checkout, commands, files, typed, warm_stages
from tests.waiting import HANG_S

PAGE, CONFIG = "tutorial-mixture", "configs/experiments/mixture.yaml"


def test_mixtures_are_random_have_the_sum_1_and_stay_when_more_are_drawn():
    few, many = (drawn(MixtureFile(base="base.yaml", mixtures=count), ["a", "b", "c"]) for count in (6, 30))
    assert few == {name: many[name] for name in few} and len({str(one) for one in many.values()}) == 30
    assert {round(sum(shares.values()), 2) for shares in many.values()} == {1.0}
    assert all(0.2 < sum(shares[name] for shares in many.values()) / 30 < 0.5 for name in "abc")


@pytest.mark.parametrize(("changes", "expected"), [
    ({"weights": {"nope": 1.0}}, "weights: nope is no source of the base, which has a, b"),
    ({"mixtures": 4}, "4 mixtures are too few for 2 sources: give 5 or more"),
    ({"mixture": 8}, "unknown key 'mixture'")])
def test_what_is_wrong_with_a_file_is_said(tmp_path, changes, expected):
    source = {"kind": "files", "paths": ["*.txt"]}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(merged(MINI, {"shard": {"sources": [
        {**source, "name": "a"}, {**source, "name": "b"}]}})))
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "mixtures": 8, **changes}))
    with pytest.raises(UserError, match=re.escape(expected)):
        read_mixture(tmp_path / "mixture.yaml")


@pytest.mark.slow
@pytest.mark.timeout(2 * HANG_S)
def test_the_tutorial_comes_to_a_measured_mixture(tmp_path, corpus):
    """Three sources, six mixtures of twelve steps: the page's commands, and again, which trains nothing."""
    home = warm_stages(checkout(tmp_path))
    texts = [path.read_text() for path in sorted(corpus.glob("*.txt"))]
    for number, name in enumerate(("code", "notes", "web")):
        (home / "data" / name).mkdir(parents=True)
        for place, text in enumerate(texts[number::3]):
            (home / "data" / name / f"{place}.txt").write_text(text.upper() if name == "web" else text)
    shown = files(PAGE)
    base = yaml.safe_load(shown["configs/experiments/mixture_base.yaml"])
    (home / "configs/experiments").mkdir()
    (home / "configs/experiments/mixture_base.yaml").write_text(yaml.safe_dump(merged(MINI, {
        "name": "mixture_base", "shard": {"validation_share": 0.3, "sources": [
            {**source, "paths": [f"{home}/data/{source['name']}/*.txt"]} for source in base["shard"]["sources"]]},
        "evaluate": {"prompts": []}, "launch": {"processes": 1}})))
    (home / CONFIG).write_text(yaml.safe_dump({**yaml.safe_load(shown[CONFIG]), "mixtures": 6}))
    first, again = (typed(command, home) for command in commands(PAGE))
    assert first.returncode == again.returncode == 0, first.stdout + first.stderr + again.stderr
    assert first.stderr.count("-seed0: done in") == 8 and "done in" not in again.stderr
    made = json.loads(again.stdout)
    assert made["sentence"] in " ".join(first.stdout.split()) and "Measured: " in made["sentence"]
    outcome = made["trainings"][-1]
    results = json.loads((home / f"runs/mixture/{outcome['name']}-seed0/evaluate/results.json").read_text())
    measured = {name: one["bits_per_byte"] for name, one in results["validation"]["sources"].items()}
    assert outcome["losses"] == measured and outcome["shares"] == made["mixture"]
    assert made["measured"] == pytest.approx(sum(measured.values()) / 3)
    assert sum(made["mixture"].values()) == pytest.approx(1, abs=0.011)
    assert f"{made['measured']:.4f}" in (home / "runs/mixture/mixture.html").read_text()
