"""Going on from a checkpoint: what is said of code that has changed since, and of another order."""

import json

import pytest

from pipeline.errors import UserError
from pipeline.records.checkpoints import TrainingProgress
from pipeline.training.resume import changed_code, continued


def test_code_that_changed_since_a_checkpoint_is_named(tmp_path):
    (tmp_path / "COMPLETE.json").write_text(json.dumps({
        "format": 2, "progress": {"step": 4}, "files": [], "code": {"a.py": "1", "b.py": "2", "mine": "3"}}))
    assert changed_code(tmp_path, {"a.py": "1", "b.py": "2", "mine": "3"}) == ""
    assert "other code than is here now (mine)" in changed_code(tmp_path, {"a.py": "1", "b.py": "2", "mine": "4"})
    assert "(a.py, b.py, c.py and 1 more)" in changed_code(tmp_path, {"c.py": "1"})


def test_a_checkpoint_that_does_not_say_is_taken_as_it_is(tmp_path):
    (tmp_path / "COMPLETE.json").write_text(json.dumps({"format": 2, "progress": {"step": 4}, "files": []}))
    assert changed_code(tmp_path, {"a.py": "1"}) == ""


def test_another_order_is_refused_unless_it_is_accepted(tmp_path):
    progress = TrainingProgress(step=4, plan_sha256="a" * 64, restarts=1)
    assert continued(tmp_path, progress, "a" * 64, drift=False).restarts == 2
    with pytest.raises(UserError, match="was trained on other token shards"):
        continued(tmp_path, progress, "b" * 64, drift=False)
    assert continued(tmp_path, progress, "b" * 64, drift=True).plan_sha256 == "b" * 64
