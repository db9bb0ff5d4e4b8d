"""The batch that is planned and shown is the batch that trains, for every way to spread it over ranks."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from launch.describe import training_facts
from model.config import ModelConfig
from pipeline.config.batch import BatchPlan
from pipeline.config.checks import rank_problems
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainConfig
from pipeline.config.tree import Config
from pipeline.data.exclusion import Excluded
from pipeline.parallel.grid import Grid
from pipeline.parallel.ranks import Ranks
from pipeline.training.data.step_batches import StepBatches
from pipeline.training.session import Session
from pipeline.training.summary import summary_lines

MODEL = ModelConfig(dim=64, layers=2, heads=8, kv_heads=8, vocab_size=512, context_length=64)
LENGTH, SEQUENCES = 32, 48


def config(tp, dp_replicate, micro_batch):
    return Config(model=MODEL, parallel=ParallelConfig(tp=tp, dp_replicate=dp_replicate),
                  train=TrainConfig(steps=10, sequence_length=LENGTH, batch_tokens=SEQUENCES * LENGTH,
                                    micro_batch=micro_batch))


def session_on(settings, rank, ranks):
    """As much of a session as decides which samples a rank takes; its batches are the sample numbers."""
    session = Session.__new__(Session)
    session.config = settings
    session.ranks = Ranks(rank, ranks, torch.device("cpu"))
    session.lay_out()
    batches = session.batches = StepBatches.__new__(StepBatches)
    batches.config, batches.grid, batches.plan, batches._of_phase = settings, session.grid, session.plan, \
        session.batch_of_phase
    batches._began, batches._excluded, batches.stored = SimpleNamespace(step=3, samples=1000), Excluded(), None
    batches.data = SimpleNamespace(batch_of=lambda numbers: numbers)
    return session


@pytest.mark.parametrize(("ranks", "tp", "dp_replicate", "micro_batch"),
                         product((1, 3, 8), (1, 2, 4), (1, 2), (1, 2, 5, 48)))
def test_a_dry_run_shows_the_batch_that_trains(ranks, tp, dp_replicate, micro_batch):
    settings = config(tp, dp_replicate, micro_batch)
    # Told without BatchPlan: ranks of a tensor group see the same, each of the others takes its share in whole
    # micro-batches.
    lays_out = ranks % (tp * dp_replicate) == 0
    even = lays_out and SEQUENCES % (ranks // tp * micro_batch) == 0
    assert (rank_problems(settings, ranks) == []) == even
    shown = [line for line in training_facts(settings, SimpleNamespace(ranks=ranks)) if line.startswith("batch")]
    if not even:
        assert shown == [] and (lays_out or "ranks" in rank_problems(settings, ranks)[0])
        return
    accumulated = SEQUENCES // (ranks // tp) // micro_batch
    expected = str(BatchPlan(SEQUENCES, LENGTH, ranks // tp, tp, micro_batch))
    assert f" x micro batch {micro_batch} x {accumulated} accumulated" in expected and expected in shown[0]
    data = SimpleNamespace(packings=(), order=SimpleNamespace(epochs=lambda samples: {"all": float(samples)}))
    grid = Grid(Ranks(0, ranks, torch.device("cpu")), settings.parallel)
    said, = [line for line in summary_lines(settings, MODEL, grid, data, "fp32") if line.startswith("batch")]
    assert expected in said
    assert f"10 steps = {10 * SEQUENCES * LENGTH:,} tokens, {10 * SEQUENCES:.2f} epochs" in said

    taken: dict[int, list[int]] = {}
    for rank in range(ranks):
        session = session_on(settings, rank, ranks)
        numbers = session.batches._make(5).tolist()
        assert len(numbers) == accumulated * micro_batch
        assert taken.setdefault(rank // tp, numbers) == numbers, "a tensor group sees the same"
    whole = [number for _, numbers in sorted(taken.items()) for number in numbers]
    assert whole == list(range(1000 + 2 * SEQUENCES, 1000 + 3 * SEQUENCES)), "every sample once, in order"


def test_words():
    assert str(BatchPlan(4096, 8192, 128, 1, 2)) == ("33,554,432 tokens a step = 4,096 sequences of 8,192 = 128 ranks "
                                                     "x micro batch 2 x 16 accumulated")
    assert "= 1 group of 2 ranks x micro batch 8 x 8 accumulated" in str(BatchPlan(64, 128, 1, 2, 8))
