"""Who of many nodes is blamed: the sick ones and never the slow ones, whatever the number of nodes."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from drover.launch.host import StepEnd
from drover.launch.slurm.job import preflight
from drover.launch.slurm.job.node_trial import EXCHANGE, PRODUCT, REDUCE, Report
from drover.launch.slurm.job.preflight import conclusion, judge
from drover.launch.slurm.job.runner import Runner
from drover.launch.slurm.job.srun import SlurmHost
from drover.launch.slurm.jobspec import JobSpec
from drover.launch.slurm.nodes import few, strikes
from drover.pipeline.records.hangs import HungRank, hang_folder, write_record
from tests.launch.fake_job import chain_of

COUNTS = (2, 64, 4096)
GPU = {"gpu": "7 GPUs instead of 8"}
TIMES = {PRODUCT: 0.01, EXCHANGE: 0.02, REDUCE: 0.05}
FAULTS = ({"problems": GPU}, {"problems": {"shm": "shm"}}, {"times": {**TIMES, PRODUCT: 3.0}},
          {"times": {**TIMES, EXCHANGE: 3.0}}, {"clock_at": 2000.0}, {"times": {}})


def nodes_of(count):
    return [f"n{number:04d}" for number in range(count)]


def sound(count):
    """What the ranks of sound nodes write, one a node."""
    return [Report(rank, node, clock_at=1000.0, times=TIMES)
            for rank, node in enumerate(nodes_of(count))]


def importing(count, answered):
    """What is there while the others still import torch: nobody has met anybody."""
    return [Report(rank, node) for rank, node in enumerate(nodes_of(count)[:answered])]


@pytest.mark.parametrize(("count", "answered"), [(2, 1), (64, 6), (64, 63), (512, 300), (4096, 4000)])
@pytest.mark.parametrize(("lasted", "quiet"), [(60.0, 0.0), (45.0, 59.0), (200.0, 150.0)])
def test_slow_nodes_are_never_blamed_and_a_sick_one_is_found_among_them(count, answered, lasted, quiet):
    """Of 512 nodes, 212 were still importing after 60 s: more than half had reported for long."""
    reports = importing(count, answered)
    found = judge(reports, nodes_of(count), lasted, quiet)
    assert not found.bad and not found.reason
    assert found.lines[0].startswith("not all nodes have answered yet") and "slow is not bad" in found.lines[0]
    assert f"({count - answered} of {count}" in found.lines[0]
    reports[0] = replace(reports[0], problems=GPU)
    assert count == 2 or judge(reports, nodes_of(count), lasted, quiet).bad == {"n0000": GPU["gpu"]}


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("count", COUNTS)
def test_never_more_than_a_few_are_blamed(count, seed):
    """Whatever is wrong with however many; those with a failed check are named in any case."""
    draw, reports = random.Random(seed), sound(count)
    for number in draw.sample(range(count), draw.choice([0, 1, few(count), count // 2, count])):
        reports[number] = replace(reports[number], **draw.choice(FAULTS))
    reports = draw.sample(reports, draw.choice([count, count, max(1, count // 2)]))
    sick = {report.node for report in reports if report.problems}
    found = judge(reports, nodes_of(count), draw.choice([5.0, 300.0]), draw.choice([0.0, 61.0, 400.0]))
    assert bool(found.reason) == (len(sick) > few(count)) == ("launch.exclude" in found.reason)
    assert set(found.bad) == sick if found.reason else len(found.bad) <= few(count) and set(found.bad) >= sick
    told = [*found.lines, *conclusion(found, reports, nodes_of(count), 100.0, "")]
    assert len(" ".join(told)) < 6000 + 100 * few(count), "thousands of names tell nobody anything"


def test_who_was_late_when_training_hung(job):
    """The late node gets a strike, and at its second the jobs that wait leave it out; half of the nodes get none."""
    job.spec = replace(job.spec, links=2, ranks=4)
    chain_of(job, "12", "13")

    def late(start, nodes=4):
        for rank in range(4):
            place = "train.py:1 step" if rank == 3 else "torch/distributed/c10d.py:1 all_reduce"
            write_record(hang_folder(job.stage, f"12.0.{start}"), HungRank(rank, f"n{rank:04}", 5, 9.0, 1.0, (place,)))
        there = Runner(job.spec, SlurmHost("12", "12", 0, tuple(nodes_of(nodes)), None, job.slurm))
        there.number = start
        return there._hang()

    assert "rank 3 (n0003)" in late(0) and strikes(job.run) == {"n0003": 1} and not job.slurm.left_out
    assert "rank 3" in late(1) and job.slurm.left_out == {"13": ["n0003"]}
    assert "rank 3" in late(2, nodes=2) and strikes(job.run) == {"n0003": 2}, "of two nodes it is not the nodes"


@pytest.mark.parametrize(("count", "strikes"), [(3, 1), (4, 0)])
def test_what_many_of_64_nodes_suffer_at_once_is_no_strike(job, count, strikes):
    there = Runner(job.spec, SlurmHost("12", "12", 0, tuple(nodes_of(64)), None, job.slurm))
    found = there._strike(dict.fromkeys(nodes_of(count), "went down"))
    assert found == dict.fromkeys(nodes_of(count), 1) if strikes else found == {}


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """Plays a trial whose ranks report at their times (seconds from the start); what it found, and whether it was to go
    on at the other times."""
    def play(nodes, arrivals, times, base_s=preflight.BASE_S):
        clock, went_on = [0.0], []

        def start(spec, command, environment, folder, goes_on):
            for clock[0] in sorted([*arrivals, *times]):
                if clock[0] in arrivals:
                    rank = arrivals.index(clock[0])
                    (tmp_path / f"node{rank}.log").write_text(f"{rank}: {json.dumps(asdict(sound(nodes)[rank]))}\n")
                went_on.append(goes_on())
            return StepEnd(143)

        monkeypatch.setattr(preflight, "BASE_S", base_s)
        monkeypatch.setattr(preflight.time, "monotonic", lambda: clock[0])
        spec = JobSpec("t", "train", ("python",), run=str(tmp_path), chain="c", ranks=nodes, nodes=nodes)
        here = SimpleNamespace(start=start, nodes=nodes_of(nodes))
        return preflight.run_preflight(spec, here, tmp_path, {}, lambda: True), went_on[len(arrivals):]

    return play


@pytest.mark.parametrize(("nodes", "limit"), [(1, 180), (2, 181), (64, 212), (512, 436), (4096, 1800)])
def test_the_trial_ends_when_its_time_is_up(trial, nodes, limit):
    found, went_on = trial(nodes, [], [0.0, limit - 1.0, limit + 1.0])
    assert went_on == [True, True, False] and not found.bad and "no node can be blamed" in found.lines[-1]


@pytest.mark.parametrize(("lasted", "stuck"), [(30, 150), (70, 210)])
def test_the_trial_ends_when_one_of_many_nodes_does_not_report(trial, lasted, stuck):
    """All others came within some seconds: after twice that, or two minutes, of silence it is blamed."""
    found, went_on = trial(4, [9, 20, lasted], [stuck - 1, stuck], 300)
    assert went_on == [True, False] and found.bad == {"n0003": "it did not report"}
