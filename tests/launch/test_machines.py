"""docs/machines.md: its commands as two nodes on this machine, and its files for Kubernetes and SkyPilot."""

import os
import shlex
import subprocess

import pytest
import yaml

from drover.launch.processes import free_port
from tests.conftest import write_config
from tests.faulty import GO, HOOKS
from tests.pages import checkout, commands, files, typed, with_programs
from tests.stages.training import assert_equal_to_the_bit, kill, proven, train_folder
from tests.waiting import HANG_S, wait_for

PREPARE, SECRET, EXPORT, TRAIN, FINISH = commands("machines")


# ---- two nodes


@pytest.fixture
def home(tmp_path, corpus):
    """A folder like the checkout, with a miniature under the page's name for the configuration."""
    checkout(tmp_path)
    write_config(tmp_path / "configs", corpus, train={"hooks": HOOKS}).rename(tmp_path / "configs/demo.yaml")
    return tmp_path


@pytest.mark.slow
def test_a_killed_node_changes_nothing(home):
    """Node 1 is killed while rank 0 waits at a step. Both start again, and end as if nothing had happened."""
    config, port = home / "configs/demo.yaml", free_port()
    for command in PREPARE, SECRET:
        assert typed(command, home).returncode == 0

    def start(node, *settings, **variables):
        train = (TRAIN.replace("--node-rank 0", f"--node-rank {node}").replace("first:29500", f"127.0.0.1:{port}")
                 .replace("--nproc-per-node 8", "--nproc-per-node 1"))
        with open(home / f"node{node}.log", "ab") as log:
            return subprocess.Popen(f"{EXPORT}\n{shlex.join([*shlex.split(train), *settings])}", shell=True, cwd=home,
                                    env={**with_programs(home), **variables}, stdout=log, stderr=log)

    def run(*settings):
        nodes = [start(node, *settings) for node in (0, 1)]
        assert [node.wait(HANG_S) for node in nodes] == [0, 0], (home / "node0.log").read_text()

    run("name=whole", "reuse=configs/runs/mini")
    first, second = (start(node, DROVER_FAULTS="wait:rank=0,step=7") for node in (0, 1))
    waits = train_folder(config) / "faults/wait-rank0-step7"
    wait_for(waits.exists, (home / "node0.log").read_text, of=first)
    kill(second)
    waits.with_name(f"{waits.name}{GO}").touch()
    assert first.wait(HANG_S) != 0, "the other node ends by itself"
    run()
    assert proven(config)
    assert_equal_to_the_bit(config)
    assert typed(FINISH, home).returncode == 0


# ---- files for Kubernetes and SkyPilot


def started(script, folder, **variables):
    """What such a script gives to torchrun; /shared is a folder."""
    (folder / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "torchrun").chmod(0o755)
    return subprocess.run(["bash", "-c", script.replace("/shared", str(folder))], check=True, text=True,
                          capture_output=True, env={"PATH": f"{folder}:{os.environ['PATH']}", **variables}
                          ).stdout.splitlines()


@pytest.mark.parametrize("name, script, variables, first", [
    ("jobset.yaml", lambda jobset: jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"][0]["args"][0], {"JOB_COMPLETION_INDEX": "1"}, "demo-train-0-0.demo"),
    ("sky.yaml", lambda task: task["run"], {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"},
     "10.0.0.7")])
def test_the_file_starts_what_the_page_types_on_the_second_machine(tmp_path, name, script, variables, first):
    typed_there = TRAIN.replace("--node-rank 0", "--node-rank 1").replace("first:", f"{first}:")
    task = yaml.safe_load(files("machines")[name])
    assert started(script(task), tmp_path, **variables) == shlex.split(typed_there)[1:]
