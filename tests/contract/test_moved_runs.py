"""A run folder that was moved, renamed or copied is the run where it is: for stages, launcher and tools alike."""

import json
import shutil

import pytest
import yaml

from launch.run_status.run_files import read_run
from launch.status import find_run
from pipeline.config.loading import load_config
from pipeline.contract.entry import stage_main
from pipeline.contract.run import Run, run_in
from pipeline.encode import encode
from pipeline.errors import UserError
from pipeline.records.metrics import plan_changes, read_metrics
from tests.stand_ins import call, copy_corpus, count_bytes, never
from tests.tools.recorded import Recorded
from tools.audit import main as audit
from tools.where.__main__ import main as where


@pytest.fixture
def moved(place):
    """A run with a finished stage, renamed into another folder; its old place is gone."""
    assert call(place, "shard", copy_corpus) == 0
    (place / "elsewhere").mkdir()
    return (place / "runs/a").rename(place / "elsewhere/b")


def test_a_moved_run_is_itself_by_its_own_config(moved, place, capsys):
    config = load_config(moved / "config.yaml")
    assert config.folder == moved and Run(config).state("shard").kind == "done"
    arguments = ["--config", str(moved / "config.yaml")]
    assert stage_main("shard", never, arguments) == 0 and "up to date" in capsys.readouterr().out
    assert stage_main("tokenizer", count_bytes, arguments) == 0
    assert (moved / "tokenizer/manifest.json").is_file() and not (place / "runs/a").exists()
    assert yaml.safe_load((moved / "config.yaml").read_text())["name"] == "b"


def test_a_copy_leaves_the_original_alone(place):
    assert call(place, "shard", copy_corpus) == 0
    shutil.copytree(place / "runs/a", place / "runs/copy")
    before = {path: path.stat().st_mtime_ns for path in (place / "runs/a").rglob("*")}
    assert stage_main("tokenizer", count_bytes, ["--config", str(place / "runs/copy/config.yaml")]) == 0
    assert (place / "runs/copy/tokenizer/manifest.json").is_file()
    assert {path: path.stat().st_mtime_ns for path in (place / "runs/a").rglob("*")} == before


def test_overrides_and_other_files_name_their_own_run(moved, place, tmp_path):
    """To repeat a run under another name, its config is given; a file that is no run's means what it says."""
    again = load_config(moved / "config.yaml", ["name=again"])
    assert again.folder == moved.parent / "again"
    assert load_config(moved / "config.yaml", ["runs_dir=other"]).folder.as_posix() == "other/b"
    (tmp_path / "own").mkdir()
    shutil.copy(moved / "config.yaml", tmp_path / "own/config.yaml")
    shutil.copy(moved / "config.yaml", moved / "mine.yaml")
    for path in (tmp_path / "own/config.yaml", moved / "mine.yaml"):
        assert load_config(path).folder == place / "runs/a"


def test_from_within_the_folder(moved, monkeypatch):
    monkeypatch.chdir(moved)
    assert load_config("config.yaml").folder.resolve() == moved
    assert find_run(".").name == "b"
    monkeypatch.chdir(moved / "shard")
    assert load_config("../config.yaml").folder.resolve() == moved
    assert run_in(moved / "shard/..").folder.resolve() == moved


def test_a_run_in_its_place_keeps_its_config_as_written(place, monkeypatch):
    """A relative runs_dir stays relative: where the folder is what was written, nothing is replaced."""
    assert call(place, "shard", copy_corpus) == 0
    config = yaml.safe_load((place / "runs/a/config.yaml").read_text())
    (place / "runs/a/config.yaml").write_text(yaml.safe_dump({**config, "runs_dir": "runs"}))
    monkeypatch.chdir(place)
    assert load_config(place / "runs/a/config.yaml").runs_dir == "runs"


def test_a_folder_name_that_is_none_is_refused_with_its_place(moved):
    odd = moved.rename(moved.with_name("b (copy)"))
    with pytest.raises(UserError, match=r"the run folder .*b \(copy\): 'name' is 'b \(copy\)'"):
        load_config(odd / "config.yaml")


def test_a_reused_run_that_moved_along_is_found_beside(fresh, tmp_path, encoded, capsys):
    """Both folders go elsewhere together; the path in the config leads nowhere any more."""
    run = Run(load_config(fresh))
    shutil.copytree(encoded.parent / "runs/mini", tmp_path / "runs/first")
    settings = load_config(fresh, [f"reuse={tmp_path}/runs/first"])
    Recorded(tmp_path / "runs/mini", encoded)
    (tmp_path / "runs/mini/config.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    elsewhere = (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert not run.folder.exists()
    found = run_in(elsewhere / "mini")
    assert found.stage_folder("encode") == elsewhere / "first/encode"
    assert read_run(elsewhere / "mini").stages["encode"].reused == elsewhere / "first"
    assert stage_main("encode", encode, ["--config", str(elsewhere / "mini/config.yaml"),
                                         f"runs_dir={elsewhere}", "name=mini"]) == 0
    assert f"up to date, reused from {elsewhere / 'first/encode'}" in capsys.readouterr().out
    assert where(["--run", str(elsewhere / "mini"), "--step", "2"]) == 0
    assert "samples [16, 32)" in capsys.readouterr().out
    assert audit(["--run", str(elsewhere / "mini")]) == 0
    assert "proven" in capsys.readouterr().out


def test_metrics_of_a_killed_run_count_their_last_lines(tmp_path):
    """Steps done again, by a restart and by a rollback, and the torn line of a kill."""
    path = tmp_path / "metrics.jsonl"
    lines = [*({"step": step, "loss": 5.0 - step} for step in (1, 2, 3, 4)),
             *({"step": step, "loss": 50.0 - step} for step in (3, 4, 5))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "lo')
    found = read_metrics(str(path))
    assert [(line["step"], line["loss"]) for line in found] == [(1, 4.0), (2, 3.0), (3, 47.0), (4, 46.0), (5, 45.0)]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_metrics_of_a_former_plan_do_not_count(tmp_path):
    """What was logged beyond the step from which a start went on along another plan, whatever the clocks say."""
    path = tmp_path / "metrics.jsonl"
    lines = [*({"step": step, "loss": 5.0 - step, "time": 90} for step in (1, 2, 3, 4, 5)),
             *({"step": step, "loss": 50.0 - step, "time": 80, "plan_changes": 1} for step in (3, 4))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = [{"event": "plan_changed", "step": step, **more} for step, more in ((0, {}), (2, {"number": 1}))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in changed))
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 4.0), (2, 3.0), (3, 47.0), (4, 46.0)]
    assert plan_changes(tmp_path) == 1
    with open(tmp_path / "events.jsonl", "a") as events:
        events.write(json.dumps({"event": "plan_changed", "step": 3, "number": 2}) + "\n")
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3] and plan_changes(tmp_path) == 2
