"""The batch that is shown is the one that is planned, for every way to spread it over ranks. That its samples are
trained on once, tests/stages/test_elastic.py shows."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
import yaml

from drover.launch.describe import training_facts
from drover.model.config import ModelConfig
from drover.pipeline.config.batch import BatchPlan, with_largest
from drover.pipeline.config.checks import rank_problems
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.phases import in_phases
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.training.summary import summary_lines
from tests.conftest import REPOSITORY
from tests.refusal import table

MODEL = ModelConfig(dim=64, layers=2, heads=8, kv_heads=8, vocab_size=512, context_length=64)
LENGTH, SEQUENCES = 32, 48


def config(tp, dp_replicate, micro_batch):
    return Config(model=MODEL, parallel=ParallelConfig(tp=tp, dp_replicate=dp_replicate),
                  train=TrainConfig(steps=10, sequence_length=LENGTH, batch_tokens=SEQUENCES * LENGTH,
                                    micro_batch=micro_batch))


@pytest.mark.parametrize(("ranks", "tp", "dp_replicate", "micro_batch"),
                         product((1, 3, 8), (1, 2, 4), (1, 2), (1, 5)))
def test_a_dry_run_shows_the_batch_that_training_says(ranks, tp, dp_replicate, micro_batch):
    settings = config(tp, dp_replicate, micro_batch)
    shown = [line for line in training_facts(settings, SimpleNamespace(ranks=ranks)) if line.startswith("batch")]
    if ranks % (tp * dp_replicate) or SEQUENCES % (ranks // tp):
        assert shown == [] != rank_problems(settings, ranks)
        return
    expected = str(BatchPlan.of(settings.train, settings.parallel, ranks))
    data = SimpleNamespace(packings=(), order=SimpleNamespace(epochs=lambda samples: {"all": float(samples)}))
    grid = Grid(Ranks(0, ranks, torch.device("cpu")), settings.parallel)
    said, = [line for line in summary_lines(settings, MODEL, grid, data, "fp32") if line.startswith("batch")]
    assert expected in said and expected in shown[0]
    assert f"10 steps = {10 * SEQUENCES * LENGTH:,} tokens, {10 * SEQUENCES:.2f} epochs" in said


@pytest.mark.parametrize(("parallel",), table("""
    {}
    {tp: 2}
    {cp: 2, tp: 2}
    {dp_replicate: 2}
    {pp: 2}
    {pp: 3, cp: 2}
    {pp: 2, tp: 2}
    {pp: 2, pp_schedule: interleaved}
    {pp: 4, pp_schedule: interleaved}""", yaml.safe_load), ids=str)
def test_the_largest_micro_batch_that_fits_is_taken_in_each_phase(parallel):
    """By trying each number of sequences at once, each number of times, without BatchPlan."""
    pp, interleaved = parallel.get("pp", 1), "pp_schedule" in parallel
    shared, layout = pp * parallel.get("cp", 1) * parallel.get("tp", 1), ParallelConfig(**parallel)
    seen = set()
    for ranks, at_most, sequences in product((1, 2, 4, 6, 8, 12, 24), (1, 2, 5, 16, 100), ((48,), (6, 30), (7, 96))):
        if ranks % (shared * parallel.get("dp_replicate", 1)):
            continue
        fit = [max((size for size in range(1, at_most + 1) for count in range(pp, of_all + 1)
                    if ranks // shared * size * count == of_all and not (interleaved and count % pp)), default=None)
               for of_all in sequences]
        lengths = [LENGTH * number for number in range(1, len(sequences) + 1)]
        phases = [{"until": 10**6 * (number + 1), "sequence_length": length, "batch_tokens": length * of_all}
                  for number, (length, of_all) in enumerate(zip(lengths, sequences, strict=True))]
        settings = Config(model=MODEL, parallel=layout, train=TrainConfig(micro_batch=at_most, phases=phases))
        assert [f"train.phases[{number}]" for number, size in enumerate(fit) if size is None] == [
            problem.partition(":")[0] for problem in rank_problems(settings, ranks)]
        seen.update(fit)
        if None in fit:
            continue
        plans = [BatchPlan.of(phase.train, layout, ranks) for phase, _ in in_phases(settings)]
        assert [plan.micro_batch for plan in plans] == fit
        assert all(plan.data_ranks * plan.micro_batch * plan.accumulation == plan.sequences for plan in plans)
        assert with_largest(settings, ranks).train.sequence_length == max(
            (size * length, length) for size, length in zip(fit, lengths, strict=True))[1]
    assert None in seen and len(seen) > 4


@pytest.mark.parametrize(("given", "ranks"), table("""
    demo -> 2
    phases_demo -> 2
    shakespeare_char -> 1
    shakespeare_char_gpu -> 1
    tinystories -> 8
    llama3.2_1b -> 8
    llama3_8b -> 8
    llama3_8b_128k -> 8
    llama3_70b -> 1024
    llama3_405b -> 16384
    llama3_405b train.sequence_length=131072 model.context_length=131072 parallel.cp=16 -> 16384""", str.split, int))
def test_shipped_recipes_take_the_micro_batch_that_they_name(given, ranks):
    settings = load_config(REPOSITORY / f"configs/{given[0]}.yaml", given[1:])
    for _, within in in_phases(settings):
        assert BatchPlan.of(within.train, within.parallel, ranks).micro_batch == within.train.micro_batch
    assert rank_problems(settings, ranks) == []


def test_copies_can_be_as_many_as_the_ranks_make():
    assert ParallelConfig(dp_replicate=-1, dp_shard=4, tp=2).sizes(24) == (1, 3, 4, 1, 2)


def test_words():
    assert str(BatchPlan(4096, 8192, 128, 1, 2, 2)) == ("33,554,432 tokens a step = 4,096 sequences of 8,192 = 128 "
                                                        "ranks x micro-batch 2 x 16 accumulated")
    assert "= 1 group of 2 ranks x micro-batch 8 (at most 9) x 8 accumulated" in str(BatchPlan(64, 128, 1, 2, 8, 9))
