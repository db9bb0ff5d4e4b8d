"""Preflight: who is judged bad from which reports, what a rank finds, and what the runner does with it.

The sick nodes are blamed, and never more than a few, whatever the number of nodes.
"""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import yaml

from drover.launch.job import preflight
from drover.launch.job.host import JobSpec, StepEnd
from drover.launch.job.preflight import (
    PreflightResult,
    RankReport,
    judge,
    meet,
    node_problems,
    read_reports,
    run_preflight,
    try_node,
)
from drover.launch.slurm.nodes import failures, few, record_failure
from tests.launch.fake_job import make_job
from tests.refusal import table


def nodes_of(count):
    return [f"n{number}" for number in range(1, count + 1)]


def healthy(count):
    """The reports of healthy nodes, of one rank each."""
    return [RankReport(rank, node, met=True) for rank, node in enumerate(nodes_of(count))]


@pytest.mark.parametrize("count, changes, bad", table("""
    4 -> {} -> {}
    4 -> {2: {problem: no /dev/shm}} -> n3: no /dev/shm
    4 -> {3: null} -> n4: it did not report
    4 -> {0: null, 1: null, 2: null, 3: null} -> {}
    4 -> {0: &nobody {met: false}, 1: *nobody , 2: *nobody , 3: *nobody } -> {}
    4 -> {0: {problem: it, shared: true}} -> n1: it
    2 -> {1: null} -> "n2: did not report. These are 1 of 2 nodes at once"
    4 -> {0: &sick {problem: it}, 1: *sick } -> "it (n1, n2: 2 of 4 nodes at once, which has a cause in common: no"
    1 -> {0: {problem: it, shared: true}} -> "it (n1: 1 of 1 node at once"
    1 -> {0: {problem: it}} -> n1: it""", int, *[yaml.safe_load] * 2))
def test_the_table(count, changes, bad):
    """changes: what is different in the reports of some ranks; null: there is none.

    If all are silent, or nobody met, it is not the nodes. The job ends without a strike where more of four nodes than
    one have a problem, or most have it with what they share.
    """
    reports = [replace(report, **changes.get(report.rank, {})) for report in healthy(count)
               if changes.get(report.rank, {}) is not None]
    result = judge(reports, nodes_of(count))
    if isinstance(bad, dict):
        assert (result.bad, result.reason) == (bad, "")
    else:
        assert bad in result.reason + " ".join(result.lines) and bool(result.reason) == (count != 2)


@pytest.mark.parametrize("sick, silent, blamed", [(3, 3, 3), (2, 1, 3), (0, 4, 0), (4, 0, 4)])
def test_never_more_than_a_few_are_blamed(sick, silent, blamed):
    """Of 64 nodes three; those with a failed check are named in any case."""
    reports = [*(RankReport(rank, f"n{rank + 1}", "7 GPUs") for rank in range(sick)), *healthy(64)[sick + silent:]]
    result = judge(reports, nodes_of(64))
    assert len(result.bad) == blamed and bool(result.reason) == (sick > few(64))


@pytest.mark.parametrize("nodes, arrivals, ends_at, bad", table("""
    1 -> [] -> 181 -> {}
    512 -> [] -> 436 -> {}
    4096 -> [] -> 1800 -> {}
    4 -> [9, 20, 170] -> 182 -> n4: it did not report""", *[yaml.safe_load] * 4))
def test_when_a_trial_in_a_container_ends(tmp_path, monkeypatch, nodes, arrivals, ends_at, bad):
    """When its time is up. Who is silent then is bad, unless most are (arrivals: when the others reported)."""
    clock = [0.0]

    def start(spec, command, environment, folder, has_time):
        assert spec.srun_args == ("--container-image=i",) and command[:2] == ["w", "python"]
        for rank, arrival in enumerate(arrivals):
            clock[0] = arrival - 1.0
            assert has_time()
            clock[0] = arrival
            report = healthy(nodes)[rank]
            early, late = (json.dumps(asdict(replace(report, met=met))) for met in (False, True))
            (folder / f"node{rank}.log").write_text(
                f"{rank}: [NCCL] {{a: warning}}\n{rank}: {early}\n{rank}: []\n{rank}: {late}\n{rank}: {early}")
            assert has_time() and report in read_reports(folder), "the newest that is whole"
        for clock[0], expected in ((ends_at - 1.0, True), (ends_at, False)):
            assert has_time() == expected
        return StepEnd(143)

    monkeypatch.setattr(preflight.time, "monotonic", lambda: clock[0])
    result = trial(tmp_path, nodes, start)
    assert result.bad == bad and ("no node can be blamed" in " ".join(result.lines)) == (not bad)


def trial(folder, nodes, start):
    """The result of a preflight whose step is played."""
    spec = JobSpec("t", "train", ("python",), run=str(folder), chain="c", ranks=nodes, nodes=nodes,
                   srun_args=("--container-image=i",), wrap=("w",))
    return run_preflight(spec, SimpleNamespace(start=start, nodes=nodes_of(nodes)), folder, {}, lambda: True)


@pytest.mark.parametrize("lines, status, stops", [
    (["image 1: gone", "image 2: gone"], 255, True), (["no image", "fine"], 255, False), (["no image"], 255, False),
    (["image 1: gone", "image 2: gone"], None, False)])
def test_what_ends_every_node_before_it_can_begin_ends_the_job(tmp_path, lines, status, stops):
    """A container that cannot start, say, or a network that all ranks lack; not a step that was ended because it was
    slow (no exit status)."""
    def start(spec, command, environment, folder, has_time):
        for node, line in enumerate(lines):
            (folder / f"node{node}.log").write_text(f"{node}: {line}\n")
        return StepEnd(143, exit_code=status)

    result = trial(tmp_path, 2, start)
    assert not result.bad and ("training starts" in " ".join(result.lines)) == (not stops)
    assert result.reason.startswith("rank 0: image 1: gone (the same on all nodes") == stops


def test_each_task_tests_the_gpu_that_it_has(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "meet", lambda *_: None)
    for name, value in {"RANK": "5", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0", "PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for mask, problem in ("GPU-7", "nvidia-smi does not answer"), ("0,1,2,3", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        try_node(tmp_path, 1.0, 4)
        report = RankReport(**json.loads(capsys.readouterr().out.splitlines()[0]))
        assert report.problem == problem


def test_a_bad_node(tmp_path, monkeypatch):
    problems = [*node_problems(tmp_path / "gone", 2, 1.0, ["sh", "-c", "echo ill; exit 1"], tmp_path / "shm")]
    assert [shared for _, shared in problems] == [True, False, False, True]
    assert [problem for problem, _ in problems] == [
        f"it cannot write into {tmp_path}/gone: No such file or directory",
        f"{tmp_path}/shm does not exist or has less than 64 MB free", "0 GPUs instead of 2", "ill"]
    (tmp_path / "launch").mkdir()
    for name in ("LEAST_DISK", "LEAST_SHARED"):
        monkeypatch.setattr(preflight, name, 1 << 60)
    room, memory = (problem for problem, _ in node_problems(tmp_path, 0, 1.0, ["true"], tmp_path))
    assert "MB are free in" in room and "MB free" in memory


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch):
    """As with a driver that is too old: training would run on the CPU."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    meet(report := RankReport(0, "n1"), 1.0, gpus=1)
    assert "cannot use its GPUs" in report.problem and not report.met


@pytest.fixture
def job(tmp_path):
    """A train job with preflight."""
    return make_job(tmp_path, preflight=True)


def test_there_is_no_trial_without_the_setting_or_without_ranks(job):
    assert "preflight: all is well" in job.go("work")[1] and job.events("preflight")[0]["bad"] == {}
    for changes in ({"preflight": False}, {"preflight": True, "ranks": 0}):
        assert "preflight" not in job.go("work", job="13", **changes)[1]


@pytest.mark.parametrize("bad, reason, restart, follows, words", table("""
    {n2: no disk} -> null -> 0 -> [requeue, null, ["12"], {n2: 1}] -> queueing this job again
    {n2: no disk} -> null -> 1 -> [stop, failed, [], {n2: 2}] -> submit the same command again
    {n1: no disk, n2: no disk} -> it is so on all nodes -> 0 -> [stop, failed, [], {}] -> preflight: it is so on all \
nodes""", *[yaml.safe_load] * 4))
def test_a_bad_node_is_named_and_left_out(job, bad, reason, restart, follows, words):
    """At its second failure, by the next submission. What fails on every node is not the nodes'. follows: how the job
    ends, the stage's state, jobs queued again, strikes."""
    for _ in range(restart):
        record_failure(job.run, "n2", "12.0.0", "failed preflight")
    end, log = job.go(trial=PreflightResult(bad, [], reason), restart=restart)
    state = getattr(job.state(), "status", None)
    assert [end, state, job.slurm.requeued, failures(job.run)] == follows and words in log, log
    assert not job.events("attempt") and job.events("preflight")[-1]["bad"] == bad
