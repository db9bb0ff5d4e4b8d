"""The whole chain on a Slurm cluster that loses a node, to the report: it trains as one process on one box does.

It is submitted, watched and asked about as docs/slurm.md and docs/slurm-quick-start.md say: their commands are typed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drover.launch.slurm.submission import PARTS
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import read_lines
from drover.pipeline.records.metrics import read_metrics
from drover.tools.audit import audit
from tests.conftest import REPOSITORY, merged, run_stage, write_config
from tests.faulty import GO, PLUGIN
from tests.launch.launcher import holding
from tests.slurm.faults import Cluster, OnCluster

BLOCK = re.compile(r"<!-- needs a cluster -->\n```bash\n(.*?)```", re.DOTALL)
COMMANDS = [line.split("  #")[0].strip().removesuffix(" --follow") for page in ("slurm.md", "slurm-quick-start.md")
            for block in BLOCK.findall((REPOSITORY / "docs" / page).read_text()) for line in block.splitlines()
            if " demo" in line or "--cluster lab" in line]
"""Of the pages, for the lab, without --follow, which would not end. tests/test_slurm_lab.py and test_sites.py run those
of the lab itself and the doctor."""
START, CONTINUE = (command for command in COMMANDS if " run " in command)
TOKEN, PASSWORD, KEY = (f"{kind}_nobody_may_write_this_down" for kind in ("hf", "password", "key"))
SETTINGS: dict[str, Any] = {"train": {"precision": "fp64"}, "launch": {"processes": 1}}
GRID = {"pp": 2, "cp": 2}
"""How the four nodes' ranks are laid out: what they train is the same."""
WAIT = 9
"""Step before which training waits until a node is lost: the one after a checkpoint."""


class Submitted(OnCluster):
    """The run of the page, submitted to a cluster from `home`, which looks like a checkout. lost: a node."""

    def __init__(self, cluster: Cluster, home: Path) -> None:
        super().__init__(cluster, home / "runs/demo")
        self.home, self.lost = home, ""

    def type(self, command, **variables):
        """What a user types, in the home, whose code it runs; what was printed."""
        typed = command.replace("drover ", "python -m drover ", 1)
        message = self.call("bash", "-c", typed, cwd=self.home, variables={
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **variables})
        assert "Traceback" not in message
        return message

    def lose_a_node(self):
        """Once training waits, kill the last of its nodes; then let it go on elsewhere."""
        note = self.note(WAIT)
        self.next(note.exists, "rank 0 to wait before a step")
        self.lost = self.events("attempt")[-1]["nodes"][-1]
        self.cluster.kill_node(self.lost)
        note.with_name(note.name + GO).touch()


@pytest.fixture(scope="module")
def done(cluster, tmp_path_factory, corpus):
    """The page's chain, at its end. What it was submitted from is broken from end to end meanwhile."""
    home = copy_of_the_repository(tmp_path_factory.mktemp("chain") / "home")
    secrets = home.parent / "secrets.sh"
    secrets.touch(0o600)
    secrets.write_text(f"export MY_PASSWORD={PASSWORD}\n")
    config = write_config(home, corpus, name="demo", runs_dir="runs", **merged(merged(SETTINGS, PLUGIN), {
        "parallel": GRID, "launch": {
        "secrets": ["HF_TOKEN"], "setup": [f". {secrets}"], "shard": {"array": 1}, "preflight": False,
        "environment": {"DROVER_FAULTS": f"wait:rank=0,step={WAIT}"}}}))
    config.rename(home / "configs/demo.yaml")
    submitted = Submitted(cluster, home)
    submitted.type(START, HF_TOKEN=TOKEN, OUR_KEY=KEY)
    whole = {path: path.read_text() for path in (home / "launch/job/runner.py",
                                                   *(home / "pipeline").glob("*.py"))}
    for path in whole:
        path.write_text("raise SystemExit('this was edited after the submission')\n")
    submitted.lose_a_node()
    submitted.until(cluster.is_idle, "an empty queue")
    cluster.start_node(submitted.lost)
    for path, text in whole.items():
        path.write_text(text)
    yield submitted
    cluster.cancel_all()


def copy_of_the_repository(folder):
    """A copy without git, different from the original in a line."""
    folder.mkdir()
    parts = [part for part in PARTS if (REPOSITORY / part).exists()]
    subprocess.run(["cp", "-a", *parts, folder], cwd=REPOSITORY, check=True)
    for name in STAGES:
        with open(folder / "pipeline" / f"{name}.py", "a") as file:
            file.write("# a line that only this copy has\n")
    return folder


def test_training_went_on_without_the_lost_node(done):
    first, second = done.events("attempt")
    assert second["restart"] > first["restart"] and second["from"] == WAIT - 1
    assert len(set(second["nodes"])) == 4 and done.lost in first["nodes"] and done.lost not in second["nodes"]
    assert done.lost in done.events("ended")[0]["reason"]
    failures = list(read_lines(done.run / "launch/nodes.jsonl"))
    # The next start records it again if this one ended before it could say so: the same failure of the same start.
    assert {(failure["node"], failure["reason"][:9]) for failure in failures} == {(done.lost, "went down")}
    assert len({failure["job"] for failure in failures}) == 1
    assert read_manifest(done.run / "train").execution["world_size"] == 4


def test_training_has_the_losses_of_one_process(done, corpus, tmp_path):
    config = write_config(tmp_path, corpus, **SETTINGS, reuse=str(done.run))
    run_stage("train", config)
    ours, theirs = (read_metrics(folder / "train/metrics.jsonl") for folder in (done.run, tmp_path / "runs/mini"))
    assert len(ours) == len(theirs) == 12
    for one, other in zip(ours, theirs, strict=True):
        assert (one["step"], one["samples"]) == (other["step"], other["samples"])
        assert max(abs(one[name] - other[name]) for name in ("loss", "grad_norm")) < 1e-12
    assert not audit(done.run).faults


def test_no_file_holds_the_shells_secrets(done):
    assert (done.run / "report.html").is_file() and list(done.run.glob("logs/train/*/node0.log"))
    assert not holding(done.run, TOKEN, PASSWORD, KEY)


def test_the_rest_of_the_page_does_what_it_says(done):
    message = {command: done.type(command, HF_TOKEN=TOKEN, COLUMNS="150")
               for command in [*COMMANDS, "drover logs demo train --rank 1"] if command != START}

    def of(part):
        return next(text for command, text in message.items() if part in command)

    rows = {line.split()[0]: line.split()[1] for line in reversed(of("status demo --watch").splitlines())
            if len(line.split()) > 1}  # of a stage the first line: others are its figures
    assert {stage: rows.get(stage) for stage in STAGES} == dict.fromkeys(STAGES, "done")
    assert "step 12/12" in of("logs demo train") and of("logs demo train --rank 1")
    assert "nothing to stop" in of("drover stop") and "no job of runs/demo is in the queue" in of("drover cancel")
    assert "--nodes 4" in START and "--nodes 2" in CONTINUE
    assert "nothing to submit: all requested stages are done" in message[CONTINUE]
