"""Figures for ranks that are not there: by the arithmetic that engines follow, which is compared with an engine's."""

import re

import pytest

from tests.parallel.groups import end_groups, run_case
from tools.at_scale.__main__ import main


def saved(ranks, **parallel):
    """Compare what an engine on these ranks gives to be saved with what the arithmetic says of it."""
    from pipeline.config.parallel import ParallelConfig
    from pipeline.config.training import TrainConfig
    from pipeline.config.tree import Config
    from pipeline.parallel.grid import Grid
    from pipeline.parallel.initial_values import drawn
    from pipeline.training.engines.build import build_engine
    from pipeline.training.precision import DTYPES
    from tests.parallel.train_steps import model_of
    from tools.at_scale.layouts import saved_by_fsdp
    model = model_of()
    config = Config(model=model, parallel=ParallelConfig(**parallel),
                    train=TrainConfig(precision="fp32", compile=False))
    grid = Grid(ranks, config.parallel)
    engine = build_engine(config, model, grid, DTYPES["fp32"], 1, drawn(model, 0))
    computed = saved_by_fsdp(model, ranks.world, grid.tensor, grid.replicate)
    given = {name.removeprefix("model."): [(piece.offset, tuple(piece.tensor.shape)) for piece in pieces
                                           if piece.tensor.numel()]
             for name, pieces in engine.state_shards().items() if name.startswith("model.")}
    expected = {name: found for name in engine.parts if (found := computed(ranks.rank, name))}
    return {"same": ranks.gather({name: found for name, found in given.items() if found} == expected),
            "some": len(expected)}


@pytest.mark.slow
def test_the_arithmetic_is_the_engines():
    for parallel in ({}, {"dp_replicate": 2, "tp": 2}):
        found = run_case(4, "saved", {"body": "tests.tools.test_at_scale:saved", **parallel})
        assert all(found["same"]) and found["some"]
    end_groups()


@pytest.mark.parametrize("layout", [["--layout", "zero3"], ["--tensor", "4", "--replicate", "2"]])
def test_the_index_of_many_ranks_is_put_together_and_read(layout, capsys):
    assert main(["index", "--model", "ladder_15m", "--ranks", "72", *layout]) == 0
    said = capsys.readouterr().out
    pieces, runs = (int(count.replace(",", "")) for count in re.search(r"in ([\d,]+) pieces are ([\d,]+) runs",
                                                                       said).groups())
    assert runs < pieces / 4 and "rank 36, which goes on" in said


def test_a_draw_and_sockets_are_measured(capsys):
    assert main(["draw", "--model", "ladder_15m", "--ranks", "4", "--tensor", "2"]) == 0
    assert re.search(r"rank 2 draws [\d,]{9,} values in", capsys.readouterr().out)
    assert main(["channel", "--ranks", "6"]) == 0
    group, channel = (int(count) for count in re.findall(r"(\d+) sockets a rank", capsys.readouterr().out))
    assert channel == 1 < 5 <= group
