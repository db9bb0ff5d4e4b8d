"""A run's folder that cannot be: one sentence before anything starts, by launcher and stages alike."""

import os
from pathlib import Path

import pytest

from drover.launch.commands import why
from drover.launch.submit import main as submit
from drover.pipeline.config.section import blocked, make_folder
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.core.errors import UserError
from tests.refusal import refused
from tests.stand_ins import never

CANNOT_BE = [("file", "/file is not a folder"), ("file/deeper/still", "/file is not a folder"),
             ("link", "/link is not a folder")]


@pytest.mark.parametrize(("runs_dir", "message"), CANNOT_BE)
def test_a_run_folder_that_cannot_be(place, capsys, runs_dir, message):
    (place / "file").write_text("x")
    (place / "link").symlink_to(place / "nowhere")
    before = sorted(place.iterdir())
    arguments = ["--config", f"{place}/c.yaml", f"runs_dir={place}/{runs_dir}"]
    for more in (["local"], ["local", "--dry-run"], ["slurm", "--dry-run"]):
        assert submit(["--stage", "shard", "--cluster", *more, *arguments, "train.warmup_steps=2000"]) == 2
        text = capsys.readouterr().err
        assert message in text and "2 problems" in text and "train.warmup_steps 2000" in text, text
    assert why(["shard", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert stage_main("shard", never, arguments) == 2
    assert message in capsys.readouterr().err and sorted(place.iterdir()) == before


def test_a_folder_that_may_not_be_written(place, capsys, monkeypatch):
    """The real look at permissions: root may everything, and would see nothing of them."""
    theirs = place / "theirs"
    theirs.mkdir()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path) and allowed(path, mode))
    arguments = ["--config", f"{place}/c.yaml", f"runs_dir={theirs}/deeper"]
    assert submit(["--stage", "shard", "--cluster", "local", *arguments]) == 2
    assert f"you may not write into {theirs}: set runs_dir" in capsys.readouterr().err and not list(theirs.iterdir())
    assert submit(["--stage", "shard", "--cluster", "slurm", "--dry-run", *arguments]) == 0, "it may be another machine"
    (theirs / "deeper/a").mkdir(parents=True)
    assert stage_main("shard", never, arguments) == 2
    assert "/theirs/deeper/a: set runs_dir" in capsys.readouterr().err


def test_a_folder_is_made_or_found_or_the_system_refuses_it(tmp_path):
    """Nothing can be made in /proc, whoever asks and whatever its permissions say."""
    place = tmp_path / "a/b"
    assert blocked(place) is None and blocked(place, write=True) is None
    make_folder(place)
    make_folder(place)
    assert place.is_dir()
    refused(UserError, "/proc/drover/a", make_folder, Path("/proc/drover/a"))

