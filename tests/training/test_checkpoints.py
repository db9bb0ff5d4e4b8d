"""The saver on one rank, and continuing from what it saved."""

import json
import os
from unittest.mock import Mock

import pytest
import torch

from drover.pipeline.config.training import CheckpointConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.sharded_tensors import CheckpointReader, Index, TensorShard, write_index, write_part
from drover.pipeline.records.checkpoints import MARKER, TrainingProgress
from drover.pipeline.training import checkpoints as module
from drover.pipeline.training.checkpoints import AsyncSaver, Checkpoints, changed_code, continued, load
from tests.formats.cutting import whole
from tests.refusal import refused
from tests.training.saving import Log, save


@pytest.fixture()
def make(tmp_path, ranks):
    """From settings to (saver, checkpoints, what was said), on a group of one."""
    def made(**settings):
        printed = []
        checkpoints = Checkpoints(tmp_path / "checkpoints", ranks, printed.append)
        saver = AsyncSaver(checkpoints, CheckpointConfig(**settings), {}, Log())
        return saver, checkpoints, printed
    return made


def test_what_is_saved_is_the_moment_of_the_call(make, monkeypatch):
    monkeypatch.setattr(module, "SLAB_BYTES", 100)  # the two tensors need more than one slab
    saver, checkpoints, _ = make(keep=5)
    living = torch.full((3, 5), 1.0)
    still = torch.arange(7)
    for step in (1, 2):
        saver.save({"model.a": [whole(living)], "model.b": [whole(still)]}, TrainingProgress(step=step))
        living.add_(1)  # training goes on at once
    saver.wait()
    for step in (1, 2):
        with CheckpointReader(checkpoints.path(step)) as reader:
            assert torch.equal(reader.read("model.a"), torch.full((3, 5), float(step)))
            assert torch.equal(reader.read("model.b"), still)


def test_a_failed_removal_is_no_failure_of_the_save(make, monkeypatch):
    """One rank alone would try again, and the others' channel go on without it."""
    saver, checkpoints, printed = make(keep=1, attempts=2)
    monkeypatch.setattr(checkpoints, "prune", Mock(side_effect=ValueError("broken")))
    save(saver, 1)
    assert saver.event.names() == ["checkpoint"]
    assert any("warning" in text and "broken" in text for text in printed)
    assert checkpoints.newest_valid()[1].step == 1


def test_what_a_kill_left_of_a_removal_goes_although_a_newer_checkpoint_is_sound_and_one_with_a_torn_marker_stays(make):
    saver, checkpoints, printed = make(keep=5)
    save(saver, 1, 2, 3)
    (checkpoints.path(1) / MARKER).unlink()
    os.truncate(checkpoints.path(3) / MARKER, 20)
    assert checkpoints.newest_valid()[1].step == 2
    assert {path.name for path in checkpoints.folder.iterdir()} == {"step-00000002", "step-00000003.damaged"}
    for words in "step-00000001 has no COMPLETE.json", "COMPLETE.json is truncated":
        assert any(words in text for text in printed)


def test_a_checkpoint_of_another_form_is_named_and_left_alone(make):
    saver, checkpoints, _ = make()
    save(saver, 1)
    marker = checkpoints.path(1) / MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 3}))
    refused(UserError, r"by another version of Drover \(format 3, this one reads 2\)", checkpoints.newest_valid)
    assert checkpoints.path(1).is_dir(), "nothing was renamed"


def test_code_that_changed_since_a_checkpoint_is_named(tmp_path):
    (tmp_path / "COMPLETE.json").write_text(
        '{"format": 2, "progress": {"step": 4}, "files": [], "code": {"a.py": "1", "b.py": "2", "mine": "3"}}')
    assert changed_code(tmp_path, {"a.py": "1", "b.py": "2", "mine": "3"}) == ""
    assert "other code than is here now (mine)" in changed_code(tmp_path, {"a.py": "1", "b.py": "2", "mine": "4"})
    assert "(a.py, b.py, c.py and 1 more)" in changed_code(tmp_path, {"c.py": "1"})


def test_another_order_is_refused_unless_it_is_accepted(tmp_path):
    progress = TrainingProgress(step=4, plan_sha256="a" * 64)
    assert continued(tmp_path, progress, "a" * 64, accepted=False) == progress
    refused(UserError, "was trained on other token shards", continued, tmp_path, progress, "b" * 64, accepted=False)
    assert continued(tmp_path, progress, "b" * 64, accepted=True).plan_sha256 == "b" * 64


def test_a_rank_finds_its_generator_if_it_was_there(tmp_path, monkeypatch):
    states = torch.arange(6, dtype=torch.uint8).view(2, 3)
    restored = []
    parts = [write_part(tmp_path / str(rank), {"random.cpu": [TensorShard(states[rank:rank + 1], (rank, 0), (2, 3))]})
             for rank in range(2)]
    write_index(tmp_path, Index.joined(parts))
    monkeypatch.setattr(torch, "set_rng_state", lambda state: restored.append(state.tolist()))
    for rank in range(3):
        ranks = Mock(rank=rank, device=torch.device("cuda"), by_leader=lambda function: function())
        load(tmp_path, Mock(), ranks, 4)
    assert restored == states.tolist()
