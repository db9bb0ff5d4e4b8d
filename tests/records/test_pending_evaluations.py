"""Checkpoints that wait for their evaluation beside training are not removed."""

from drover.pipeline.config.tree import Config
from drover.pipeline.core.files import write_json
from drover.pipeline.parallel.ranks import ALONE
from drover.pipeline.records.checkpoints import MARKER
from drover.pipeline.records.pending_evaluations import pending_evaluations
from drover.pipeline.training.checkpoint import Checkpoints

STEPS = [10, 20, 30, 40, 50]
CONFIG = Config.model_validate({"train": {"steps": 100, "checkpoint": {"every_steps": 10}},
                                "launch": {"evaluate": {"every_checkpoints": 2}}})
"""Checkpoints every 10 of 100 steps, every second one to be evaluated."""


def left(run):
    """The checkpoints that are left of STEPS when all but the newest are removed."""
    folder = run / "train/checkpoints"
    for step in STEPS:
        write_json(folder / f"step-{step:08d}" / MARKER, {})
    Checkpoints(folder, ALONE, lambda text: None, pending_evaluations(run, CONFIG)).prune(1, None)
    return sorted(int(path.name[-8:]) for path in folder.iterdir())


def test_what_waits_for_a_result_is_kept_until_it_has_one(tmp_path, monkeypatch):
    monkeypatch.setenv("DROVER_CHAIN", "a")
    assert left(tmp_path) == [20, 40, 50]
    write_json(tmp_path / "evaluations/step-00000020/evaluate/manifest.json", {})
    assert left(tmp_path) == [40, 50]


def test_where_nobody_evaluates_nothing_waits(tmp_path, monkeypatch):
    monkeypatch.delenv("DROVER_CHAIN", raising=False)
    assert left(tmp_path) == [50]
