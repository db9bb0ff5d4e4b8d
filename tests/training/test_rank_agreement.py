"""Ranks that do not run the same thing are refused with who has what; those that do are told in one line."""

import pytest

from drover.pipeline.contract.state import StageJob
from drover.pipeline.training.rank_agreement import RankAgreement
from tests.stages.training import run_train

PLAIN = {"device": "CPU", "torch": "2.13.0", "python": "3.11.9", "nccl": "", "code": "c" * 64, "config": "d" * 64,
         "chain": "", "world": None}


def topology(ranks, per_node=2, **changes):
    """So many ranks; changes: by rank, as rank1={...}."""
    return RankAgreement([PLAIN | {"node": f"n{rank // per_node}"} | changes.get(f"rank{rank}", {})
                          for rank in range(ranks)])


def test_ranks_that_are_alike_are_told_in_one_line():
    assert str(topology(4)) == "4 ranks on 2 nodes: n0 0-1, n1 2-3; CPU; torch 2.13.0"

    assert str(topology(4096, 8)) == ("4,096 ranks on 512 nodes: n0 0-7, n1 8-15, n2 16-23, n3 24-31 and 508 more "
                                      "nodes; CPU; torch 2.13.0")
    assert not topology(4, rank0={"world": 4}).problem() and not topology(4).warning()
    mixed = topology(4, rank3={"device": "NVIDIA H100 80GB HBM3 SXM5"})  # slow and not wrong
    assert not mixed.problem() and "CPU on 0-2 (n0, n1), NVIDIA H100 80GB HBM3 SXM5 on 3" in mixed.warning()


@pytest.mark.parametrize("changes, message", [
    ({"code": "e" * 64}, "code cccccccccccc on 0-2"),
    ({"torch": "2.11.0"}, "torch 2.13.0 on 0-2 (n0, n1), 2.11.0 on 3 (n1)."),
    ({"chain": "abc"}, "submission none on 0-2")])
def test_ranks_that_run_different_things_are_refused(changes, message):
    assert message in topology(4, rank3=changes).problem()


@pytest.mark.slow
def test_a_real_run_tells_and_refuses(fresh):
    printed = run_train(fresh, "--job", str(StageJob(ranks=2)), ranks=2).stdout
    assert printed.count("2 ranks on 1 node: ") == 1
    refused = run_train(fresh, "name=other", "--job", str(StageJob(ranks=3)), expect=2)
    assert "1 rank found each other, but 3 were to be started" in refused.stderr
