"""A run folder that was moved, renamed or copied is the run where it is: for stages, launcher and tools alike."""

import shutil

import pytest

from drover.launch.describe import reuse_lines
from drover.launch.run_status import read_run
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.run import run_in
from drover.pipeline.core.errors import UserError
from tests.refusal import refused
from tests.stand_ins import call, copy_corpus, count_bytes, never


@pytest.fixture
def moved(place):
    """A run with a finished stage, renamed into another folder; its old place is gone."""
    assert call(place, "shard", copy_corpus) == 0
    (place / "elsewhere").mkdir()
    return (place / "runs/a").rename(place / "elsewhere/b")


def test_a_moved_run_is_itself_by_its_own_config(moved, place, capsys):
    assert load_config(moved / "config.yaml").folder == moved
    arguments = ["--config", str(moved / "config.yaml")]
    assert stage_main("shard", never, arguments) == 0 and "up to date" in capsys.readouterr().out
    assert stage_main("tokenizer", count_bytes, arguments) == 0
    assert (moved / "tokenizer/manifest.json").is_file() and not (place / "runs/a").exists()


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


def test_a_folder_name_that_is_none_is_refused_with_its_place(moved):
    odd = moved.rename(moved.with_name("b (copy)"))
    refused(UserError, r"the run folder .*b \(copy\): 'name': 'b \(copy\)' must be letters", load_config,
            odd / "config.yaml")


def test_a_reused_run_that_moved_along_is_found_next_to_it(place, capsys):
    """Both folders go elsewhere together; the path in the config leads nowhere any more."""
    assert call(place, "shard", copy_corpus) == 0
    assert call(place, "tokenizer", count_bytes, "name=b", f"reuse={place}/runs/a") == 0
    elsewhere = (place / "runs").rename(place / "elsewhere")
    assert run_in(elsewhere / "b").stage_folder("shard") == elsewhere / "a/shard"
    assert read_run(elsewhere / "b").stages["shard"].reused
    assert reuse_lines(run_in(elsewhere / "b")) == [
        f"reuse     {elsewhere}/a, because {place}/runs/a holds no run"]
    assert stage_main("shard", never, ["--config", str(elsewhere / "b/config.yaml")]) == 0
    assert f"up to date, reused from {elsewhere / 'a/shard'}" in capsys.readouterr().out
