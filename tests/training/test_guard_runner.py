"""What ranks other than the first are spared, although all of them judge every step alike."""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from drover.pipeline.config.training import GuardConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.provenance import SeenDocument
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.training.engine import StepResult
from drover.pipeline.training.guards import GuardRunner
from tests.refusal import refused

NAN = StepResult(math.nan, 1.0, False)


@pytest.mark.parametrize("is_rank_zero", [True, False])
def test_one_rank_reads_documents_and_tells_and_all_stop_with_its_words(monkeypatch, is_rank_zero):
    read = Mock(return_value=[SeenDocument("web", "train-0.arrow", 5, "abc", [8])])
    printed = Mock()
    log = Mock()
    monkeypatch.setattr("drover.pipeline.training.guards.documents_of", read)
    ranks = SimpleNamespace(is_rank_zero=is_rank_zero, by_leader=lambda read: [],
                            same=lambda value: value if is_rank_zero else "what rank 0 has read")
    runner = GuardRunner(Mock(**{"config.train.guards": GuardConfig(max_skipped=1)}), ranks, Mock(), printed)
    runner.batch_sequences = 8
    runner.judge_step(1, NAN, TrainingProgress(), True, log)
    assert read.call_count == printed.call_count == log.call_count == is_rank_zero
    refused(UserError, "web/abc" if is_rank_zero else "what rank 0 has read", runner.judge_step, 2, NAN,
            TrainingProgress(step=1, samples=8), True, log)
    assert read.call_count == 2 * is_rank_zero
