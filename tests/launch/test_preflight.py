"""Preflight: who is judged bad from which reports, what a rank finds, and what the runner does with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.slurm import preflight
from launch.slurm.nodes import excluded
from launch.slurm.preflight import Report, check_gpus, check_node, judge
from tests.launch.fake_srun import Job, chain_of, make_job

NODES = ["n1", "n2", "n3", "n4"]
SOUND = [Report(rank, node, joined=True, clock_at=1000.0 + rank / 10, product_s=0.010, reduce_s=0.02, finished=True)
         for rank, node in enumerate(NODES)]


def but(rank: int, **changes: Any) -> list[Report]:
    """Sound reports but for one rank's."""
    return [replace(report, **changes) if report.rank == rank else report for report in SOUND]


@pytest.mark.parametrize(("reports", "bad"), [
    (SOUND, {}),
    (but(2, problems=["/dev/shm is not there", "and more"]), {"n3": "/dev/shm is not there"}),
    ([report for report in SOUND if report.rank != 3], {"n4": "it did not report"}),
    (but(1, joined=False, clock_at=None, product_s=None, reduce_s=None),
     {"n2": "its ranks did not meet the others over the network"}),
    ([replace(report, joined=False) for report in SOUND], {}),  # nobody met: it is not the nodes
    (but(1, clock_at=1009.0), {"n2": "its clock is 9 s fast"}),
    (but(1, clock_at=990.0), {"n2": "its clock is 10 s slow"}),
    (but(1, clock_at=1004.0), {}),
    (but(3, product_s=0.5), {"n4": "a matrix product took 500 ms, 50.0 times the others' 10 ms"}),
    (but(3, product_s=0.045), {}),  # more than 4 times, but by 35 ms only
    ([replace(report, device="cuda") for report in but(3, product_s=0.045)],
     {"n4": "a matrix product took 45 ms, 4.5 times the others' 10 ms"}),
    (but(3, product_s=0.035), {}),
    (but(0, reduce_s=0.9), {"n1": "an all-reduce took 900 ms, 45.0 times the others' 20 ms"}),
    (but(0, reduce_s=None, finished=False), {}),
    ([], dict.fromkeys(NODES, "it did not report")),
])
def test_the_table(reports: list[Report], bad: dict[str, str]) -> None:
    assert judge(reports, 4, 4.0, NODES) == bad


def test_several_ranks_of_a_node_are_one_node() -> None:
    reports = [Report(rank, NODES[rank // 2], joined=True, product_s=3.0 if rank == 5 else 0.01) for rank in range(8)]
    assert list(judge(reports, 8, 4.0)) == ["n3"]


def test_a_sound_node(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    assert check_node(tmp_path, gpus=0, shared=tmp_path) == []
    assert not list((tmp_path / "launch").iterdir()), "the probe is removed"


def test_a_node_that_is_not_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_node(tmp_path / "gone", gpus=0, shared=tmp_path / "shm")
    assert "cannot write into" in found[0] and found[1].endswith("shm is not there")
    (tmp_path / "launch").mkdir()
    monkeypatch.setattr(preflight, "LEAST_DISK", 1 << 60)
    monkeypatch.setattr(preflight, "LEAST_SHARED", 1 << 60)
    disk, shared = check_node(tmp_path, gpus=0, shared=tmp_path)
    assert "MB are free in" in disk and "MB are free in" in shared
    monkeypatch.setattr(preflight.time, "time", lambda: 4e9)
    assert "ahead of the file system's" in check_node(tmp_path, gpus=0, shared=tmp_path)[0]


def smi(folder: Path, gpus: str, processes: str = "") -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncase $1 in *compute-apps*) printf '{processes}';; "
                                       f"*) printf '{gpus}';; esac\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert check_gpus(4) == ["2 GPUs instead of 4"]
    smi(tmp_path, "0, 0, Not Active, Not Active\\n1, [N/A], Not Active, Not Active\\n")
    assert check_gpus(2) == []
    smi(tmp_path, "0, 3, Not Active, Not Active\\n1, 0, Active, Active\\n", "1, 100\\n999999999, 5\\n")
    assert check_gpus(2) == ["GPU 0 has 3 uncorrected memory errors", "GPU 1 is throttled by its hardware (heat)",
                             "other processes compute on its GPUs (process 1)"]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert check_gpus(2) == ["nvidia-smi does not answer"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A train job of two ranks with preflight."""
    job = make_job(tmp_path, preflight=True, nodes=2)
    (job.run / "launch").mkdir(parents=True)
    job.environment = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    yield job
    job.kill_all()


def test_sound_nodes_are_trained_on(job: Job) -> None:
    status, log = job.plan("work").run_it()
    assert status == 0, log
    assert "preflight: 2 nodes sound in" in log and "a matrix product" in log
    event, = job.events("preflight")
    assert event["bad"] == {} and event["seconds"] > 0
    assert len(job.calls("srun")) == 2, "preflight, then training"


def test_a_bad_node_is_named_and_at_its_second_failure_left_to_the_next_submission(job: Job) -> None:
    status, log = job.plan("work").run_it(DROVER_PREFLIGHT_FAULT="n2:disk")
    assert status == 0 and job.calls("scontrol")[-1] == "requeue 12", log
    assert "n2 is bad: made to fail: disk" in log and not job.events("attempt") and excluded(job.run) == []
    status, log = job.plan("work").run_it(FAKE_BAD="n2:no disk", SLURM_RESTART_COUNT="1")
    assert status == 1 and "submit the same command again" in log and not job.events("attempt")
    assert job.state().status == "failed" and excluded(job.run) == ["n2"]


def test_the_next_link_goes_on_without_the_bad_node(job: Job) -> None:
    chain_of(job, "12", "13")
    status, log = job.plan("work", links=2).run_it(FAKE_BAD="n2:no shared memory")
    assert status == 0 and "the next job of the chain goes on without it" in log
    assert job.calls("scontrol")[-1] == "update JobId=13 ExcNodeList=n2,n9"
    assert not job.events("attempt") and not (job.stage / "STATE.json").exists()


def test_what_fails_on_every_node_is_not_the_nodes(job: Job) -> None:
    status, log = job.plan("work").run_it(FAKE_BAD="n1:no disk,n2:no disk")
    assert status == 1 and "on every node" in log and not (job.run / "launch" / "nodes.jsonl").exists()
    assert job.state().status == "failed"
