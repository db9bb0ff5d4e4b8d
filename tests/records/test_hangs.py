"""Who is late, from what the ranks wrote; and a watchdog that bites."""


import pytest

from drover.pipeline.contract.state import StageJob
from drover.pipeline.core.console import number_ranges
from drover.pipeline.core.files import append_line
from drover.pipeline.records import hangs
from drover.pipeline.records.hangs import hang_folder, judge_hang, write_places
from tests.refusal import table

REDUCE = ["/x/pipeline/train.py:9 train", "/x/pipeline/training/loop.py:{line} agree",
          "/y/torch/distributed/distributed_c10d.py:7 all_reduce"]
GATHER = [*REDUCE[:1], "/x/pipeline/training/fsdp_engine.py:3 step", "/y/torch/distributed/fsdp/_collectives.py:7 get"]
LEAD = ["/x/pipeline/contract/entry.py:1 _lead", "/x/pipeline/contract/entry.py:2 _locked"]
FOLLOW = ["/x/pipeline/contract/entry.py:3 _follow"]
READ = ["/x/pipeline/train.py:8 train", "/x/pipeline/data/sampling/loader.py:{line} next"]
RANKS = {"R": (5, REDUCE), "r": (4, REDUCE), "G": (5, GATHER), "D": (5, READ), "d": (5, READ[:1]),
         "L": (5, LEAD + REDUCE), "F": (5, FOLLOW + REDUCE), "f": (5, FOLLOW + READ)}
"""Step and stack of a rank: it reduces, a step earlier too, gathers, reads its data, is about to, leads, follows."""


def write(folder, ranks):
    """A record for each rank by its letter; `-`: none."""
    for rank, letter in enumerate(ranks):
        if letter in RANKS:
            step, stack = RANKS[letter]
            append_line(folder / f"node{rank // 2}.jsonl", {
                "rank": rank, "node": f"n{rank // 2}", "step": step, "silent_s": 600.0, "at": 1.0,
                "stack": [call.format(line=rank + 1) for call in stack]})


@pytest.mark.parametrize(("ranks", "late", "sentence"), table("""
    RRDR -> 2 -> rank 0-1, 3 (n0, n1) in train > agree > all_reduce
    DR -> 0 -> rank 0 (n0) in train > next (data/sampling/loader.py) after step 5
    Dd -> nobody -> do not show which
    RRRR -> nobody -> rank 0-3 (n0, n1) in train > agree > all_reduce
    DDDD -> nobody -> no rank is behind the others
    RrR -> 1 -> rank 1 (n0) in
    RRGD -> 3 -> rank 2 (n1) in
    RRG- -> 3 -> waiting for others
    RRG -> 2 -> rank 2 (n1) in
    -- -> nobody -> no rank left a record
    LfF -> 1 -> rank 0, 2 (n0, n1) in
    RR-- -> nobody -> do not show which
    RRRRRRRRRRRRRRRRRR-- -> 18-19 -> rank 18-19 (n9) left no record
    RRRRRRRRRRRRRRRRR--- -> nobody -> 3 of 20 ranks left no record
    RRD-- -> 2 -> 2 of 5 ranks left no record"""))
def test_who_is_late(tmp_path, monkeypatch, ranks, late, sentence):
    """A neighbour of who reads waits in another place than the others do. Where one leads, the functions of the entry
    that are open differ. Who is ended before it could write is not late: many, or more than wait."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(hangs, "this_job", lambda: StageJob(start=2))
    write_places(tmp_path, ["n0", "n0", "n1", *["n9"] * 17])
    folder = hang_folder(tmp_path)
    assert folder == tmp_path / "hangs/77.0.2"
    write(folder, ranks)
    hang = judge_hang(folder, len(ranks))
    assert (number_ranges([rank for rank, _ in hang.late]) or "nobody") == late and sentence in hang.text, hang.text


def test_places_of_another_start_are_not_believed(tmp_path, monkeypatch):
    write_places(tmp_path, ["n0", "n1"])
    monkeypatch.setattr(hangs, "this_job", lambda: StageJob(start=1))
    folder = hang_folder(tmp_path)
    write(folder, "R-")
    assert judge_hang(folder, 2).late == ((1, None),)
