"""Checkpoints that wait for their evaluation beside training are not removed."""

import pytest

from drover.pipeline.config.tree import Config
from drover.pipeline.core.files import write_json
from drover.pipeline.parallel.ranks import start_ranks, stop_ranks
from drover.pipeline.records.checkpoints import MARKER
from drover.pipeline.records.pending_evaluations import pending_evaluations
from drover.pipeline.training.checkpoint import Checkpoints

STEPS = [10, 20, 30, 40, 50]


@pytest.fixture
def config():
    """Checkpoints every 10 of 100 steps, every second one to be evaluated."""
    return Config.model_validate({"train": {"steps": 100, "checkpoint": {"every_steps": 10}},
                                  "launch": {"evaluate": {"every_checkpoints": 2}}})


@pytest.fixture
def ranks(monkeypatch):
    """One rank."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield start_ranks()
    stop_ranks()


def left(run, ranks, config):
    """The checkpoints that are left of STEPS when all but the newest are removed."""
    folder = run / "train/checkpoints"
    for step in STEPS:
        write_json(folder / f"step-{step:08d}" / MARKER, {})
    Checkpoints(folder, ranks, lambda text: None, pending_evaluations(run, config)).prune(1, None)
    return sorted(int(path.name[-8:]) for path in folder.iterdir())


def test_what_waits_for_a_result_is_kept_until_it_has_one(tmp_path, ranks, config, monkeypatch):
    monkeypatch.setenv("DROVER_CHAIN", "a")
    assert left(tmp_path, ranks, config) == [20, 40, 50]
    write_json(tmp_path / "evaluations/step-00000020/evaluate/manifest.json", {})
    assert left(tmp_path, ranks, config) == [40, 50]


def test_where_nobody_evaluates_nothing_waits(tmp_path, ranks, config, monkeypatch):
    monkeypatch.delenv("DROVER_CHAIN", raising=False)
    assert left(tmp_path, ranks, config) == [50]
