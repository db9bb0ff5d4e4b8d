"""Going on from a checkpoint: what is said of code that has changed since, and of another order."""

from unittest.mock import Mock

import torch

from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.sharded_tensors import Index, TensorShard, write_index, write_part
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.training.checkpoints import changed_code, continued, load
from tests.refusal import refused


def test_code_that_changed_since_a_checkpoint_is_named(tmp_path):
    (tmp_path / "COMPLETE.json").write_text(
        '{"format": 2, "progress": {"step": 4}, "files": [], "code": {"a.py": "1", "b.py": "2", "mine": "3"}}')
    assert changed_code(tmp_path, {"a.py": "1", "b.py": "2", "mine": "3"}) == ""
    assert "other code than is here now (mine)" in changed_code(tmp_path, {"a.py": "1", "b.py": "2", "mine": "4"})
    assert "(a.py, b.py, c.py and 1 more)" in changed_code(tmp_path, {"c.py": "1"})


def test_another_order_is_refused_unless_it_is_accepted(tmp_path):
    progress = TrainingProgress(step=4, plan_sha256="a" * 64, restarts=1)
    assert continued(tmp_path, progress, "a" * 64, accepted=False).restarts == 2
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
