"""A training on a real Slurm under random faults, until it is done, and the proof that they left no trace in it.

`make soak` runs it; DROVER_SOAK_SEED gives the faults in another order. What each does is in `FAULTS`.
"""

import os
import signal
import time
from random import Random

import pytest

from drover.launch.slurm.nodes import NODES
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.records.goodput import goodput
from drover.pipeline.records.metrics import RunFacts
from tests.slurm.faults import Training, undisturbed_curve
from tests.stages.training import curve, difference, lines, proven

SEED = int(os.environ.get("DROVER_SOAK_SEED", "41"))
SETTINGS = {"train": {"steps": 160, "guards": {"hang_minutes": 0.3}}}
SIZES = (1, 2, 4)
"""Nodes that training may go on with; it begins with the most."""
BOUND = 1e-9
"""Relative, in fp64: other numbers of ranks add in another order."""


class Soak:
    """A training and the dice that decide what happens to it. nodes: what the next submission asks for."""

    def __init__(self, training):
        self.training, self.dice, self.nodes = training, Random(SEED), max(SIZES)

    def done(self):
        return read_manifest(self.training.run / "train") is not None

    def submit(self):
        """Give the user's command. Nodes that failed are taken for mended: it was the soak that made them fail."""
        (self.training.run / NODES).unlink(missing_ok=True)
        self.training.submit(nodes=self.nodes)

    def await_checkpoint(self):
        """Wait for another checkpoint or the end, with the user's command where nothing is queued any more."""
        before = self.training.saved()[-1:]

        def goes_on():
            if not self.done() and self.training.cluster.is_idle():
                self.submit()
            return self.done() or self.training.saved()[-1:] != before
        self.training.until(goes_on, "another checkpoint")

    def stop(self):
        self.training.drover("stop", str(self.training.run))
        self.training.until(self.training.cluster.is_idle, "the end of training that was asked to stop")


def kill(soak, word="drover.pipeline.train", number=signal.SIGKILL):
    if result := soak.training.running(word):
        os.kill(soak.dice.choice(sorted(result)), number)


def lose_node(soak):
    node, lab = soak.dice.choice(soak.training.cluster.nodes), soak.training.cluster
    lab.kill_node(node, reported=soak.dice.random() < 0.5)
    time.sleep(soak.dice.uniform(2, 15))
    lab.start_node(node)


def resize(soak):
    soak.stop()
    soak.nodes = soak.dice.choice([size for size in SIZES if size != soak.nodes])


FAULTS = {
    "a rank is killed": kill,
    "a rank hangs": lambda soak: kill(soak, number=signal.SIGSTOP),
    "the runner is killed": lambda soak: kill(soak, "submitit.core._submit"),
    "the time limit is near": lambda soak: soak.training.cluster.run(
        "scancel", "--signal=USR2", soak.training.job(), check=False),
    "the job is queued again": lambda soak: soak.training.cluster.run(
        "scontrol", "requeue", soak.training.job(), check=False),
    "a node is lost": lose_node,
    "the controller goes": lambda soak: soak.training.cluster.restart_controller(),
    "other nodes": resize}


def order():
    """Faults in the order of the seed: every kind comes once before any comes again."""
    dice, names = Random(SEED), list(FAULTS)
    while True:
        dice.shuffle(names)
        yield from names


@pytest.mark.soak
def test_training_comes_through_random_faults(cluster, tmp_path, encoded):
    (alone := tmp_path / "undisturbed").mkdir()
    whole = undisturbed_curve(alone, encoded, **SETTINGS)
    soak = Soak(Training(cluster, tmp_path, encoded, whole, faults="", **SETTINGS))
    soak.submit()
    for name in order():
        soak.await_checkpoint()
        if soak.done():
            break
        print(f"{time.strftime('%H:%M:%S')} {soak.training.saved()[-1].name}: {name}", flush=True)
        FAULTS[name](soak)
    soak.training.wait_until_gone()
    ours = lines(soak.training.config)
    assert {record["step"] for record in curve(soak.training.config)} == set(whole)
    assert proven(soak.training.config) and difference(ours, whole) < BOUND, soak.training.story()
    assert goodput(RunFacts(soak.training.run)) is not None
