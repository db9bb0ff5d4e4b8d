"""`drover doctor`: what nodes' reports mean, and the profile that it writes. A real Slurm is in tests/slurm."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from drover.launch.doctor import NOTE, OK, PROBLEM, REPORT, _script, _wait, judge, main, profile
from drover.launch.slurm.job.node_trial import EXCHANGE, GPU, REDUCE
from drover.launch.slurm.job.site_trial import NodeFacts
from drover.launch.slurm.scheduler import NodeKind, Scheduler
from drover.pipeline.config.loading import load_config
from tests.conftest import REPOSITORY
from tests.refusal import printed, table

FIRST = NodeFacts(0, "n1", torch="2.13.0", import_s=3.0, cpus=8, clock_at=100.0, times={EXCHANGE: 0.01, REDUCE: 0.02})
SECOND = replace(FIRST, rank=1, node="n2", visible_s=0.1, locked_out=True)


def states(*facts, nodes=2, gpus=False, reason="", log=""):
    return {finding.what.strip(): finding.state for finding in judge("gpu", nodes, gpus, facts, reason, log)}


@pytest.mark.parametrize("what, state, change", table(f"""
    clocks -> {PROBLEM} -> clock_at: 107.0
    locks between nodes -> {PROBLEM} -> locked_out: false
    shared folder -> {NOTE} -> visible_s: 31.0
    Python -> {NOTE} -> import_s: 40.0
    n2 -> {PROBLEM} -> problems: {{network: "an all-reduce failed: timed out"}}""", str, str, yaml.safe_load))
def test_what_is_wrong_with_a_node_shows_alone(what, state, change):
    found = states(FIRST, replace(SECOND, **change))
    assert found.pop(what) == state and set(found.values()) == {OK}


@pytest.mark.parametrize("reason, log, part, advice", table(r"""
    still PENDING (Priority) after 10 minutes -> "" -> Priority -> ""
    "" -> "bash: /home/me/.venv/bin/python: No such file or directory" -> No such file -> "python: must exist"
    "" -> "srun: error: n1: task 0: Out Of Memory\nsrun: error: n2: task 1: Killed" -> Out Of Memory -> set launch.mem
    "" -> "slurmstepd-n1: error: Prolog failure on node n2\nsrun: forcing job" -> on node n2 -> the site's
    "" -> "" -> no node reported -> 'python: must exist'""", *[yaml.safe_load] * 4))
def test_a_job_without_reports_says_why(reason, log, part, advice):
    [finding] = judge("gpu", 2, True, [], reason, log)
    assert finding.state == PROBLEM and part in finding.found
    assert finding.advice.startswith(advice) and bool(finding.advice) == bool(advice)


def test_reports_and_empty_lines_do_not_say_what_went_wrong():
    assert all(REPORT.fullmatch(line) for line in ("", "0: ", '1: {"rank": 1, "node": "n2"}'))
    assert not any(REPORT.fullmatch(line) for line in ("1: Traceback (most recent call last):", "srun: error: Killed"))


def test_a_job_that_will_never_run_is_not_waited_for(programs):
    programs.queue("12 PENDING PartitionTimeLimit")
    assert "more time than the partition allows" in _wait(programs.scheduler(), "12", 10)


def test_the_script_quotes_what_it_is_given(tmp_path):
    launch = load_config(REPOSITORY / "configs/demo.yaml", ["launch.gpu_type=h100", "launch.mem=4G",
                                                                "launch.extra={reservation: ours}"], check=False).launch
    folder = tmp_path / "a run 100%"
    text = _script("gpu", 2, True, launch, folder, folder / "code")
    subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)
    assert f"#SBATCH --output='{tmp_path}/a run 100%%/job.log'" in text and "a run 100%%/node%n.log" in text
    for option in "mem=4G", "propagate=NONE", "gpus-per-node=h100:1", "reservation=ours":
        assert f"#SBATCH --{option}\n" in text


@pytest.mark.parametrize(("settings", "python"), [
    (["launch.python=/shared/python"], "/shared/python"),
    (["launch.python=/in/python", "launch.container={image: x.sif}"], sys.executable),
    (["launch.python=/in/python", "launch.runner_python=/out/python"], "/out/python")])
def test_the_script_runs_the_profiles_python(tmp_path, settings, python):
    launch = load_config(REPOSITORY / "configs/demo.yaml", settings, check=False).launch
    assert f"MASTER_PORT=$({python} -c " in _script("cpu", 1, False, launch, tmp_path, tmp_path / "code")


def test_a_node_whose_gpus_torch_cannot_use_is_no_fault_of_the_network():
    alone, left = replace(FIRST, problems={GPU: "too old"}), replace(SECOND, problems={"network": "timed out"})
    found = states(alone, left)
    assert found["n1"] == PROBLEM and "n2" not in found


def test_nodes_and_gpus_that_are_not_there_are_a_problem():
    assert states(FIRST)["job in gpu"] == states(FIRST, SECOND, gpus=True)["devices"] == PROBLEM


def test_a_partition_that_is_not_there_is_refused_before_a_profile_is_written(programs, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Scheduler, "node_kinds", lambda self: [NodeKind("gpu", True, 4, 64, 257000, 8, "infinite")])
    monkeypatch.setattr(Scheduler, "site_settings", lambda self: {})
    programs.do("sbatch", "exit 1")
    monkeypatch.setenv("PATH", str(programs.folder), prepend=os.pathsep)
    said = printed(capsys, main, "--partition", "gpus", "--no-jobs", "--write", tmp_path / "x.yaml", expect=2)
    assert "There is no partition gpus" in said and not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize("kinds, site, partitions, expected", table("""
    [[gpu, true, 12, 96, 1031000, 8, 2-00:00:00], [cpu, false, 7, 64, 257000, 0, infinite]] -> {JobRequeue: "0"} -> \
null -> {partition: gpu, gpus_per_node: 8, cpus: 12, requeue: false, limit: 2-00:00:00, nodes: 12, of shard: cpu}
    [[debug, true, 3, 4, 6000, 0, infinite]] -> {JobRequeue: "0"} -> null -> {partition: debug, gpus_per_node: 0, \
cpus: 4, requeue: false, limit: null, nodes: 3, of shard: null}
    [[debug, true, 4, 4, 6000, 0, "20:00", 2]] -> {} -> null -> {time: "20:00", limit: "20:00", nodes: 2}
    [[new, false, 4, 64, 9000, 8, infinite], [old, false, 4, 64, 9000, 4, infinite], [cpu, false, 4, 64, 9000, 0, \
infinite]] -> {} -> [old, cpu] -> {partition: old, gpus_per_node: 4, of shard: cpu}""", *[yaml.safe_load] * 4))
def test_the_profile_is_one_that_the_launcher_takes(tmp_path, kinds, site, partitions, expected):
    """It keeps to the limits of the partition: limit, of time, and nodes; and to the partitions that are named."""
    path = tmp_path / "mine.yaml"
    path.write_text(profile([NodeKind(*kind) for kind in kinds], site, {}, partitions))
    launch = load_config(REPOSITORY / "configs/demo.yaml", [f"launch.cluster={path}"], check=False).launch
    assert expected.items() <= {**launch.model_dump(), "limit": launch.limits.time, "nodes": launch.limits.nodes,
                                "of shard": launch.shard.partition}.items()


def test_a_machine_without_slurm_is_told_what_to_do(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([]) == 2 and "docs/slurm.md" in capsys.readouterr().err
