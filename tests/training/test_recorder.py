"""What an attempt at training records of itself."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.contract.state import PROGRESS, Progress
from drover.pipeline.core.files import read_json
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.training import recorder as module
from drover.pipeline.training.engine import StepResult

PLAN = PhasePlan.of(TrainConfig(sequence_length=64, batch_tokens=1024, warmup_steps=0, phases=[
    {"until": 10_240}, {"until": 30_720, "batch_tokens": 4096}]))


@pytest.mark.parametrize(("first", "step", "left_s"), [(0, 5, 10 * 25_600 / 5120), (10, 12, 10 * 12_288 / 8192)])
def test_the_time_that_is_left_follows_the_tokens_that_are(tmp_path, monkeypatch, first, step, left_s):
    monkeypatch.setattr(module, "open_log", Mock())
    monkeypatch.setattr(module.time, "perf_counter", Mock(side_effect=[0.0, 10.0]))
    recorder = module.Recorder(Mock(folder=tmp_path), Ranks(0, 1, torch.device("cpu")), PLAN)
    recorder.open(TrainingProgress(step=first), False)
    recorder.step(TrainingProgress(), TrainingProgress(step=step, tokens=512), StepResult(float("nan"), 1.0, True), 2.0,
                  0.0, 0.1)
    now = Progress(**read_json(tmp_path / PROGRESS))
    assert (now.done, now.total, now.left_s, now.loss, now.tokens_per_s) == (step, 15, left_s, "nan", 256.0)
