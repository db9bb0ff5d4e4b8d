"""Strikes of nodes, and what Slurm is asked and told about nodes."""

import socket
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest

from drover.launch.job.runner import Runner
from drover.launch.job.srun import SlurmHost
from drover.launch.processes import PORTS, free_port
from drover.launch.slurm.nodes import NODES, failing, failures, few, lost
from drover.pipeline.contract.state import StageState
from drover.pipeline.core.files import append_line, write_sealed
from drover.pipeline.records.hangs import HungRank, hang_folder, write_record


def fail(folder, node, hours, job):
    at = datetime.now(UTC) - timedelta(hours=hours)
    append_line(folder / NODES, {"node": node, "at": at.isoformat(), "job": job})


def test_nodes_with_two_strikes_within_a_day_are_left_out(tmp_path):
    """Never more than a few: those that failed most often go first, then those that failed last."""
    for node, hours in (("n1", (1, 2, 3)), ("n2", (1, 23)), ("n3", (1, 2)), ("n4", (1, 25))):
        for number in hours:
            fail(tmp_path, node, number, f"{number}.0")
    append_line(tmp_path / NODES, {"at": "now"})
    assert failures(tmp_path) == {"n1": 3, "n3": 2, "n2": 2, "n4": 1}, "failures expire"
    assert failing(tmp_path, 2) == ["n1"] and failing(tmp_path, 40) == ["n1", "n3"]
    assert [few(wanted) for wanted in (1, 64, 4096)] == [1, 3, 204]


def test_a_start_that_ends_well_with_a_checkpoint_lifts_the_strikes_of_its_nodes(job):
    """Those of other nodes still count."""
    for node, number in (("n1", 1), ("n2", 1), ("n2", 2), ("n9", 3)):
        fail(job.run, node, 1, f"11.{number}")
    job.slurm.nodes = ("n1", "n2", "n3")
    job.go("save 10", "lose n2", "asked", spare_nodes=1)
    assert failures(job.run) == {"n2": 3, "n9": 1}


def test_lost_nodes(programs):
    assert lost(["n1"], programs.scheduler()) == {}, "Slurm does not answer"
    gone = ["down", "down*", "idle*", "drained*", "fail", "failing", "error", "not_responding", "allocated*"]
    there = ["idle", "mixed", "allocated", "completing", "drained", "draining", "maint", "maint*", "reboot*",
             "powering_down", "powered_down*"]
    programs.say("sinfo", "\n".join(f"n-{state}|{state}" for state in gone + there))
    assert [*lost(["n1"], programs.scheduler()).values()] == gone


def test_a_port_is_held_for_the_ranks_until_the_next_one_is_asked_for():
    def bind(*options):
        with socket.socket() as other:
            for option in options:
                other.setsockopt(socket.SOL_SOCKET, option, 1)
            other.bind(("", port))
            other.listen()

    port = free_port()
    assert port in PORTS and PORTS.stop < 32768
    with pytest.raises(OSError):
        bind()  # as another runner would, on the same node
    bind(socket.SO_REUSEADDR)  # as torch's store does
    assert free_port() != port
    bind()


def runner(job, nodes, restart=0):
    """Of a start of the job on so many nodes."""
    return Runner(job.spec, SlurmHost("12", "12", restart, tuple(f"n{node}" for node in range(nodes)), None, job.slurm))


def test_who_was_late_when_training_hung(job):
    """The late node gets a failure record, and at its second the job's next starts leave it out. Half of the nodes get
    none."""
    job.spec = replace(job.spec, ranks=4)

    def late(start, nodes=4):
        for rank in range(4):
            place = "train.py:1 step" if rank == 3 else "torch/distributed/c10d.py:1 all_reduce"
            write_record(hang_folder(job.stage, f"12.0.{start}"), HungRank(rank, f"n{rank}", 5, 9.0, 1.0, (place,)))
        there = runner(job, nodes)
        there.number = start
        return there._hang(), there.host.avoid

    hang, avoided = late(0)
    assert "rank 3 (n3)" in hang and failures(job.run) == {"n3": 1} and not avoided
    assert late(1)[1] == {"n3"}
    assert "rank 3" in late(2, nodes=2)[0] and failures(job.run) == {"n3": 2}, "of two nodes it is not the nodes"


def test_starts_are_counted_over_restarts(job):
    """Those that left a log, which is not written over, and one that no launcher made."""
    assert runner(job, 1, restart=1).number == 0
    for name in ("12.1", "12.4", "123.9"):
        (job.run / "logs/train" / name).mkdir(parents=True)
    for holder, expected in (("13", 5), ("12", 7)):
        write_sealed(job.stage / "STATE.json", asdict(StageState("running", job=holder, attempt=6)))
        assert runner(job, 1, restart=1).number == expected
