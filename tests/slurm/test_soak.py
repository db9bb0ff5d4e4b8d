"""A training on a real Slurm under random faults, until it is done, and the proof that they left no trace in it.

`make soak` runs it; DROVER_SOAK_SEED gives the faults in another order.
"""

import os
import signal
import time
from random import Random

import pytest

from drover.launch.slurm.nodes import NODES
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.records.checkpoints import complete_checkpoints
from tests.slurm.faults import Training, undisturbed_curve
from tests.stages.training import curve, difference, lines, proven

SEED = int(os.environ.get("DROVER_SOAK_SEED", "41"))
SETTINGS = {"train": {"steps": 160, "guards": {"hang_minutes": 0.3}}}
BOUND = 1e-9
"""Relative, in fp64: other numbers of ranks add in another order."""
KILLS = {"a rank is killed": signal.SIGKILL, "a rank hangs": signal.SIGSTOP}
COMMANDS = {"the time limit is near": ("scancel", "--signal=USR2"), "the job is queued again": ("scontrol", "requeue")}
FAULTS = [*KILLS, *COMMANDS, "the runner is killed", "a node is lost", "the controller goes", "other nodes"]


class Soak:
    """A training and the dice that decide what happens to it. nodes: what the next submission asks for."""

    def __init__(self, training):
        self.training, self.lab, self.dice, self.nodes = training, training.cluster, Random(SEED), 4

    def disturb(self, fault):
        """Let it happen. Nodes that failed are taken for mended: it was the soak that made them fail."""
        print(f"{time.strftime('%H:%M:%S')} {fault}", flush=True)
        if fault in KILLS:
            for pid in self.training.running("drover.pipeline.train", f"RANK={self.dice.randrange(self.nodes)}"):
                os.kill(pid, KILLS[fault])
        elif fault == "the runner is killed":
            for pid in self.training.running("submitit.core._submit"):
                os.kill(pid, signal.SIGKILL)
        elif fault in COMMANDS:
            self.lab.run(*COMMANDS[fault], self.training.job(), check=False)
        elif fault == "a node is lost":
            node = self.dice.choice(self.lab.nodes)
            self.lab.kill_node(node, reported=self.dice.random() < 0.5)
            time.sleep(self.dice.uniform(2, 15))
            self.lab.start_node(node)
        elif fault == "the controller goes":
            self.lab.restart_controller()
        else:
            self.training.drover("stop", str(self.training.run))
            self.training.until(self.lab.is_idle, "the end of training that was asked to stop")
            self.nodes = 2 if self.nodes == 4 else 4  # a rank that is alone cannot notice that it hangs

    def is_done_or_saves(self):
        """Wait for the end or another checkpoint, with the user's command where nothing is queued any more."""
        def saved():
            return complete_checkpoints(self.training.run / "train")[-1:]

        def goes_on():
            done = read_manifest(self.training.run / "train") is not None
            if not done and self.lab.is_idle():
                (self.training.run / NODES).unlink(missing_ok=True)
                self.training.submit(nodes=self.nodes)
            return "done" if done else saved() != before and "saved"
        before = saved()
        return self.training.until(goes_on, "another checkpoint") == "done"


@pytest.mark.soak
def test_training_comes_through_random_faults(cluster, tmp_path, encoded):
    (alone := tmp_path / "undisturbed").mkdir()
    whole = undisturbed_curve(alone, encoded, **SETTINGS)
    soak = Soak(Training(cluster, tmp_path, encoded, whole, faults="", **SETTINGS))
    soak.training.submit(nodes=soak.nodes)
    faults = []
    while not soak.is_done_or_saves():
        faults = faults or soak.dice.sample(FAULTS, len(FAULTS))  # every kind comes once before any comes again
        soak.disturb(faults.pop())
    soak.training.wait_until_gone()
    assert {record["step"] for record in curve(soak.training.config)} == set(whole)
    assert proven(soak.training.config) and difference(lines(soak.training.config), whole) < BOUND, \
        soak.training.story()
