"""Where ranks lie in the array, by arithmetic alone."""

import math

import torch

from drover.pipeline.config.training import ParallelConfig
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.ranks import Ranks

LAYOUT = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}


def grids(**layout):
    world = math.prod(layout.values())
    return [Grid(Ranks(rank, world, torch.device("cpu")), ParallelConfig(**layout)) for rank in range(world)]


def test_ranks_that_see_the_same_samples_have_one_that_speaks():
    result = grids(**LAYOUT)
    assert [grid.data_rank for grid in result if grid.speaks] == [0, 1, 2, 3]
    for grid in result:
        same = [other for other in result if other.data_rank == grid.data_rank]
        assert len(same) == LAYOUT["pp"] * grid.sample_ranks
        assert sum(other.speaks for other in same) == 1
