"""The same questions to Slurm itself and to the fake, which is to answer as Slurm does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.slurm.clusters import Cluster
from tests.waiting import wait_for


@pytest.fixture(scope="module", params=["real_cluster", "fake_cluster"])
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cluster, str, Path]:
    """A cluster, and a job on it that waits for the signal before its time limit: up to half a minute on the real one,
    which the other tests use."""
    cluster, folder = request.getfixturevalue(request.param), tmp_path_factory.mktemp("limited")
    script = ("trap 'echo shell got USR2' USR2\n"
              "srun bash -c 'trap \"echo task got USR2; exit 0\" USR2; while :; do sleep 0.1; done'\necho srun $?")
    return cluster, cluster.submit(folder, script, "--time=1", "--signal=USR2@56", "--nodelist=n1"), folder


@pytest.fixture
def any_cluster(limited: tuple[Cluster, str, Path]) -> Cluster:
    return limited[0]


def until(path: Path, words: str) -> str:
    """Wait until a file says something; all that it says."""
    wait_for(lambda: path.exists() and words in path.read_text(),
             lambda: f"{path} does not say {words!r}: {path.exists() and path.read_text()}")
    return path.read_text()


def pairs(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_a_job_and_its_ranks_see_where_they_are(any_cluster, tmp_path):
    job = any_cluster.submit(tmp_path, 'env > batch\nsrun --ntasks=4 --output=rank%t.out --cpus-per-task=2 env',
                             "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2", "--job-name=layout",
                             MINE="kept")
    assert any_cluster.wait(job) == "COMPLETED"
    batch = pairs((tmp_path / "batch").read_text())
    first, second = re.fullmatch(r"n\[(\d)[-,](\d)\]", batch["SLURM_JOB_NODELIST"]).groups()
    assert {name: batch.get(f"SLURM_{name}") for name in (
        "JOB_ID", "JOB_NUM_NODES", "NTASKS", "TASKS_PER_NODE", "JOB_NAME", "CPUS_PER_TASK", "RESTART_COUNT",
        "NTASKS_PER_NODE")} == {
            "JOB_ID": job, "JOB_NUM_NODES": "2", "NTASKS": "4", "TASKS_PER_NODE": "2(x2)", "JOB_NAME": "layout",
            "CPUS_PER_TASK": "2", "RESTART_COUNT": None, "NTASKS_PER_NODE": "2"}
    assert batch["SLURMD_NODENAME"] == f"n{first}" and batch["MINE"] == "kept" and "SLURM_STEP_ID" not in batch
    ranks = [pairs((tmp_path / f"rank{number}.out").read_text()) for number in range(4)]
    assert [[rank[f"SLURM_{name}"] for name in ("PROCID", "LOCALID", "NODEID", "NTASKS", "STEP_ID", "JOB_NODELIST")]
            for rank in ranks] == [[str(number), str(number % 2), str(number // 2), "4", "0",
                                    batch["SLURM_JOB_NODELIST"]] for number in range(4)]
    assert [rank["SLURMD_NODENAME"] for rank in ranks] == [f"n{first}"] * 2 + [f"n{second}"] * 2
    names = any_cluster.run("scontrol", "show", "hostnames", "n[1-2,4]").stdout
    assert names.split() == ["n1", "n2", "n4"]


@pytest.mark.parametrize(("options", "words"), [
    (["--no-such-option"], "unrecognized option"), (["--exclude=n9"], "Invalid node name specified"),
    (["--partition=nope"], "Invalid partition name specified"), (["--array=x"], "Invalid job array specification"),
    (["--time=soon"], "Invalid --time specification"), (["--gpus-per-node=1"], "Invalid generic resource"),
    (["--cpus-per-task=9"], "Requested node configuration is not available")])
def test_what_cannot_be_is_refused(any_cluster, options, words):
    answer = any_cluster.run("sbatch", *options, "--wrap=true", check=False)
    assert answer.returncode != 0 and words in answer.stderr and not answer.stdout


def test_an_array_and_who_waits_for_it(any_cluster, tmp_path):
    script = ("echo $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID $SLURM_ARRAY_TASK_COUNT\n"
              "[ $SLURM_ARRAY_TASK_ID != 5 ]")
    array = any_cluster.submit(tmp_path, script, "--array=3,5,7%1", "--output=%A_%a.out", "--hold")
    follower = any_cluster.submit(tmp_path, "true", "--array=3,5,7", f"--dependency=aftercorr:{array}",
                                  "--output=%A_%a.out", "--kill-on-invalid-dep=yes")
    good, never, dead = (any_cluster.submit(tmp_path, "true", f"--dependency={kind}:{array}", *more)
                         for kind, more in (("afterany", []), ("afterok", []),
                                            ("afterok", ["--kill-on-invalid-dep=yes"])))
    shown = any_cluster.run("squeue", "-h", "-o", "%i|%T|%r", "-j", array).stdout
    assert shown == f"{array}_[3,5,7%1]|PENDING|JobHeldUser\n"
    each = any_cluster.run("squeue", "-h", "-r", "-o", "%i", "-j", array).stdout.split()
    assert each == [f"{array}_{index}" for index in (3, 5, 7)]
    assert any_cluster.state(good) == "PENDING Dependency"
    any_cluster.run("scontrol", "release", array)
    assert any_cluster.wait(good) == "COMPLETED"
    assert [any_cluster.wait(f"{array}_{index}") for index in (3, 5, 7)] == ["COMPLETED", "FAILED", "COMPLETED"]
    assert (tmp_path / f"{array}_7.out").read_text() == f"{array} 7 3\n"
    assert any_cluster.wait(dead) == "CANCELLED"
    assert any_cluster.wait(never, "PENDING DependencyNever") == "PENDING DependencyNeverSatisfied"
    any_cluster.run("scancel", never)
    assert any_cluster.wait(never) == "CANCELLED"
    assert [any_cluster.wait(f"{follower}_{index}") for index in (3, 7)] == ["COMPLETED"] * 2
    assert (tmp_path / f"{follower}_7.out").exists() and not (tmp_path / f"{follower}_5.out").exists()


def test_a_job_that_requeues_itself_keeps_its_id_and_those_who_wait_for_it(any_cluster, tmp_path):
    script = ('echo start ${SLURM_RESTART_COUNT:-first}\n'
              f'[ -n "$SLURM_RESTART_COUNT" ] && {{ until [ -e {tmp_path}/go ]; do sleep 0.1; done; exit 0; }}\n'
              'scontrol requeue $SLURM_JOB_ID\nsleep 3600; echo lingered')
    job = any_cluster.submit(tmp_path, script, "--requeue", "--job-name=twin", "--hold")
    after = any_cluster.submit(tmp_path, "true", f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes")
    twin = any_cluster.submit(tmp_path, "true", "--dependency=singleton", "--job-name=twin")
    any_cluster.run("scontrol", "release", job)
    until(tmp_path / f"out.{job}", "start first")
    assert [any_cluster.state(waiting) for waiting in (after, twin)] == ["PENDING Dependency"] * 2
    (tmp_path / "go").touch()
    assert [any_cluster.wait(one) for one in (job, after, twin)] == ["COMPLETED"] * 3
    said = (tmp_path / f"out.{job}").read_text()
    assert re.findall("start .*|lingered", said) == ["start first", "start 1"]


TRAPS = """trap 'echo shell got USR2' USR2; trap 'echo shell got TERM; exit 1' TERM
srun --ntasks=2 --nodes=2 --kill-on-bad-exit=1 bash -c '
  trap "echo task \\$SLURM_PROCID got USR2" USR2; trap "touch term.\\$SLURM_PROCID; exit 3" TERM
  bash -c "trap \\"echo child got USR2\\" USR2; echo listens; while :; do sleep 0.1; done" &
  echo ready; while :; do sleep 0.1; done' &
while :; do wait; sleep 0.1; done"""


def test_signals_reach_steps_and_cancelling_reaches_all(any_cluster, tmp_path):
    job = any_cluster.submit(tmp_path, TRAPS, "--nodes=2")
    out = tmp_path / f"out.{job}"
    wait_for(lambda: out.exists() and sorted(out.read_text().split()) == ["listens"] * 2 + ["ready"] * 2, out.read_text)
    any_cluster.run("scancel", "--signal=USR2", job)
    until(out, "task 0 got USR2")
    until(out, "task 1 got USR2")
    until(out, "child got USR2")
    assert any_cluster.state(job) == "RUNNING"
    any_cluster.run("scancel", job)
    assert any_cluster.wait(job) == "CANCELLED"
    said = out.read_text()
    assert "shell got TERM" in said and "shell got USR2" not in said
    assert all((tmp_path / f"term.{number}").exists() for number in (0, 1))


def test_one_bad_rank_ends_the_others(any_cluster, tmp_path):
    script = ("srun --ntasks=2 --kill-on-bad-exit=1 --output=rank%t.out bash -c '"
              "[ $SLURM_PROCID = 0 ] && until grep -q up rank1.out; do sleep 0.1; done && exit 7; "
              "trap \"echo told; exit 9\" TERM; echo up; while :; do sleep 0.1; done'\necho status $?\n"
              "srun --ntasks=1 --nodes=1 false; echo status $?\n"
              "srun --ntasks=3 --output=none bash -c 'exit $((SLURM_PROCID + 3))'; echo status $?\n"
              "srun --ntasks=5 true; echo status $?; srun --ntasks=1 --nodelist=n9 true; echo status $?")
    job = any_cluster.submit(tmp_path, script, "--nodes=2", "--ntasks-per-node=2")
    assert any_cluster.wait(job) == "COMPLETED"
    statuses = re.findall(r"^status (\d+)", (tmp_path / f"out.{job}").read_text(), re.MULTILINE)
    assert statuses[0] != "0" and statuses[1:] == ["1", "5", "1", "1"]
    assert (tmp_path / "rank1.out").read_text().splitlines()[:1] == ["up"]


def test_nodes_left_out_and_nodes_asked_for(any_cluster, tmp_path):
    job = any_cluster.submit(tmp_path, "srun --nodelist=n4 --ntasks=1 --nodes=1 --overlap bash -c "
                             "'echo on $SLURMD_NODENAME'\nsleep 3600", "--nodes=2", "--exclude=n1,n3")
    until(tmp_path / f"out.{job}", "on n4")
    shown = any_cluster.run("squeue", "-h", "-o", "%i|%T|%N|%j|%D", "-j", job).stdout.strip()
    assert shown.startswith(f"{job}|RUNNING|n[2,4]|") and shown.endswith("|2")
    held = any_cluster.submit(tmp_path, "true", "--hold", "--job-name=kept")
    any_cluster.run("scontrol", "update", f"JobId={held}", "ExcNodeList=n1,n2")
    excluded = re.findall("ExcNodeList=(.*)", any_cluster.run("scontrol", "show", "job", held).stdout)[0]
    assert any_cluster.run("scontrol", "show", "hostnames", excluded).stdout.split() == ["n1", "n2"]
    assert any_cluster.run("squeue", "-h", "-o", "%i %r", "-n", "kept").stdout.split() == [held, "JobHeldUser"]
    any_cluster.run("scancel", job, held)
    assert any_cluster.wait(job) == any_cluster.wait(held) == "CANCELLED"


def test_a_lost_node_sends_its_job_elsewhere(any_cluster, tmp_path):
    job = any_cluster.submit(tmp_path, 'echo start $SLURM_RESTART_COUNT $SLURM_JOB_NODELIST\n'
                             '[ -n "$SLURM_RESTART_COUNT" ] && exit 0\n'
                             'srun --kill-on-bad-exit=1 bash -c "echo up; exec sleep 3600"; sleep 3600',
                             "--nodes=2", "--requeue")
    first = until(tmp_path / f"out.{job}", "up\nup").split()[-3]
    lost = f"n{re.findall(r'[0-9]+', first)[-1]}"
    any_cluster.kill_node(lost)
    try:
        assert any_cluster.wait(job) == "COMPLETED"
        again = re.findall("start 1 (.*)", (tmp_path / f"out.{job}").read_text())[0]
        assert lost not in any_cluster.run("scontrol", "show", "hostnames", again).stdout.split()
        assert any_cluster.run("sinfo", "-h", "-N", "-n", lost, "-o", "%T").stdout.strip() in ("down", "down*")
    finally:
        any_cluster.start_node(lost)
    assert any_cluster.run("sinfo", "-h", "-N", "-n", lost, "-o", "%N %T").stdout.split() == [lost, "idle"]


def test_jobs_go_on_while_the_controller_is_away(any_cluster, limited, tmp_path):
    any_cluster.wait(limited[1])  # the controller sends its signal, which would be missed
    job = any_cluster.submit(tmp_path, "echo up; until [ -e go ]; do sleep 0.1; done; echo end")
    until(tmp_path / f"out.{job}", "up")
    any_cluster.stop_controller()
    try:
        answer = any_cluster.run("squeue", check=False)
        assert answer.returncode == 1 and "Unable to contact slurm controller" in answer.stderr
        (tmp_path / "go").touch()
        until(tmp_path / f"out.{job}", "end")
    finally:
        any_cluster.start_controller()
    assert any_cluster.wait(job) == "COMPLETED"


def test_jobs_that_nobody_knows(any_cluster, tmp_path):
    for command in (["squeue", "-j", "99999"], ["scontrol", "show", "job", "99999"], ["scontrol", "requeue", "99999"]):
        answer = any_cluster.run(*command, check=False)
        assert (answer.returncode, "Invalid job id specified" in answer.stderr) == (1, True)
    assert any_cluster.run("scancel", "99999").stdout == ""
    job = any_cluster.submit(tmp_path, "true", "--dependency=afterok:99999")
    assert any_cluster.wait(job) == "COMPLETED"
    assert any_cluster.run("squeue", "-h", "-j", job).stdout == ""


def test_submitit_sees_its_job_end(any_cluster, tmp_path):
    code = ("import submitit, sys; executor = submitit.SlurmExecutor(sys.argv[1]); "
            "executor.update_parameters(time=20, use_srun=False, job_name='sum'); "
            "print('result', executor.submit(sum, [1, 2, 3]).result())")
    answer = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=REPOSITORY,
                            env={**os.environ, **any_cluster.environment()})
    assert "result 6" in answer.stdout, answer.stderr


def test_the_signal_before_the_time_limit_reaches_the_steps_only(limited):
    cluster, job, folder = limited
    assert cluster.wait(job) == "COMPLETED"
    said = (folder / f"out.{job}").read_text()
    assert "task got USR2" in said and "srun 0" in said and "shell" not in said


def test_the_fake_misbehaves_on_demand(fake_cluster, tmp_path):
    job = fake_cluster.submit(tmp_path, "sleep 3600", "--requeue")
    fake_cluster.wait(job, "RUNNING")
    assert fake_cluster.run("sacct", "-j", job, "-X", "-n", "-P", "-o", "JobID,State").stdout == f"{job}|RUNNING\n"
    assert fake_cluster.run("sacct", check=False, variables={"FAKE_SLURM_NO_SACCT": "1"}).returncode == 1
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["squeue"], env={**fake_cluster.environment(), "FAKE_SLURM_SQUEUE_HANGS": "1"}, timeout=1)
    refused = fake_cluster.run("scontrol", "requeue", job, check=False, variables={"FAKE_SLURM_REQUEUE_FORBIDDEN": "1"})
    assert (refused.returncode, refused.stderr) == (1, f"Requested operation is presently disabled for job {job}\n")
    fake_cluster.run("scancel", job)
    assert fake_cluster.wait(job) == "CANCELLED"
