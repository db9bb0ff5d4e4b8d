"""The whole chain on four nodes, to the report: what a run on one box gives, from code that nobody can change any more.

It is submitted, watched and asked about as docs/slurm.md says: every command of that page is typed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch.slurm.chain import Chain, read_chain, read_chains
from launch.slurm.submit.snapshot import PARTS
from pipeline.contract.manifest import Manifest, read_manifest
from pipeline.contract.stages import STAGES
from pipeline.contract.state import read_attempts, read_state
from pipeline.files import read_json, sha256_file
from pipeline.records.metrics import read_metrics
from pipeline.records.pending_evaluations import evaluation_record
from pipeline.training.fault_injection import GO
from tests.conftest import REPOSITORY, merged, run_stage, write_config
from tests.slurm.clusters import Cluster
from tests.waiting import wait_for
from tools.audit import audit

BLOCK = re.compile(r"<!-- needs a cluster -->\n```bash\n(.*?)```", re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCK.findall((REPOSITORY / "docs/slurm.md").read_text())
            for line in block.splitlines() if "tools.slurm_lab" not in line]
"""Of the page, but for those that start and stop a lab: tests/tools/test_slurm_lab.py does that."""
TOKEN, PASSWORD, KEY = (f"{kind}_nobody_may_write_this_down" for kind in ("hf", "password", "key"))
OF_ONE_PROCESS = {"STATE.json", "manifest.json", "started.json", "train.log"}
"""Files that tell when and where a stage was run, or of how fast."""
SETTINGS: dict[str, Any] = {
    "train": {"precision": "fp64"}, "launch": {"processes": 1, "evaluate": {"every_checkpoints": 1}}}
GRID = {"pp": 2, "cp": 2}
"""How the four nodes' ranks are laid out: what they train is the same."""
BESIDE = [4, 8]
"""Steps of the checkpoints before the last one."""


@dataclass
class Submitted:
    """A run that was submitted to a cluster from `home`, which looks like a checkout."""

    cluster: Cluster
    home: Path
    config: Path
    run: Path

    @property
    def chain(self) -> Chain:
        chain = read_chain(self.run)
        assert chain is not None
        return chain

    def manifest(self, stage: str) -> Manifest:
        manifest = read_manifest(self.run / stage)
        assert manifest is not None, self.story()
        return manifest

    def type(self, command: str, **variables: str) -> str:
        """What a user types, in the home; what was printed."""
        path = self.cluster.environment().get("PATH", os.environ["PATH"])
        answer = self.cluster.run("bash", "-c", command, check=False, cwd=self.home, variables={
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "PATH": f"{Path(sys.executable).parent}:{path}", **variables})
        assert answer.returncode == 0, f"{command}\n{answer.stdout}{answer.stderr}\n{self.story()}"
        assert "Traceback" not in answer.stderr
        return answer.stdout + answer.stderr

    def wait(self) -> None:
        """Wait until no job of the run is in the queue any more, evaluations included."""
        wait_for(lambda: not self.queued(), self.story)

    def queued(self) -> list[str]:
        """Ids of this cluster's jobs in the queue."""
        return self.cluster.run("squeue", "--noheader", "--format=%i").stdout.split()

    def story(self) -> str:
        """All that the jobs said, for a failed assertion."""
        logs = sorted(self.run.glob("logs/**/*.log")) + sorted(self.run.glob("logs/*/latest/rank0.*"))
        return "\n".join(f"==> {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, corpus: Path, encoded: Path) -> Path:
    """The same training and evaluation on one box with one process, undisturbed; its folder."""
    config = write_config(tmp_path_factory.mktemp("local"), corpus, **SETTINGS, reuse=str(encoded.parent / "runs/mini"))
    for stage in ("train", "convert", "evaluate"):
        run_stage(stage, config)
    return config.parent / "runs" / "mini"


@pytest.fixture(scope="module")
def done(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Submitted]:
    """The page's chain, at its end. What it was submitted from is broken from end to end meanwhile."""
    home = copy_of_the_repository(tmp_path_factory.mktemp("chain") / "home")
    secrets = home.parent / "secrets.sh"
    secrets.touch(0o600)
    secrets.write_text(f"export MY_PASSWORD={PASSWORD}\n")
    config = write_config(home, corpus, name="demo", runs_dir="runs", **merged(SETTINGS, {"parallel": GRID, "launch": {
        "secrets": ["HF_TOKEN"], "setup": [f". {secrets}"]}}))
    submitted = Submitted(cluster, home, config.rename(home / "configs/demo.yaml"), home / "runs/demo")
    submitted.type(COMMANDS[0], HF_TOKEN=TOKEN, OUR_KEY=KEY)
    whole = {path: path.read_text() for path in (home / "launch/slurm/job/runner.py",
                                                   *(home / "pipeline").glob("*.py"))}
    for path in whole:
        path.write_text("raise SystemExit('this was edited after the submission')\n")
    submitted.wait()
    for path, text in whole.items():
        path.write_text(text)
    yield submitted
    for job in submitted.queued():
        cluster.run("scancel", job)


def copy_of_the_repository(folder: Path) -> Path:
    """A copy without git, different from the original in a line."""
    for part in PARTS:
        if (REPOSITORY / part).is_dir():
            shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif (REPOSITORY / part).is_file():
            shutil.copy(REPOSITORY / part, folder / part)
    for name in STAGES:
        with open(folder / "pipeline" / f"{name}.py", "a") as file:
            file.write("# a line that only this copy has\n")
    return folder


def test_every_stage_is_done(done: Submitted) -> None:
    for stage in STAGES:
        assert done.manifest(stage).stage == stage
        state = read_state(done.run / stage)
        assert state is not None and state.status == "done", done.story()
    assert (done.run / "report.html").is_file()


def test_what_the_chain_is_made_of(done: Submitted) -> None:
    jobs = [job for job in read_chains(done.run)[0].jobs if job.kind != "evaluation"]
    phases = STAGES["shard"].phases
    assert [(job.stage, job.kind) for job in jobs] == [
        *(("shard", "array") for _ in phases), ("shard", "finalise"), ("tokenizer", "job"), ("encode", "array"),
        ("encode", "finalise"),
        ("train", "job"), ("convert", "job"), ("evaluate", "job"), ("report", "job")]
    assert [job.elements for job in jobs if job.kind == "array"] == [(0, 1, 2, 3)] * (len(phases) + 1)
    assert [job.phase for job in jobs if job.kind == "array"] == [*phases, "encode"]
    assert [job.dependencies for job in jobs] == [(), *((job.id,) for job in jobs[:-1])]
    ended = [(event["job"], event["status"]) for event in read_attempts(done.run) if event["event"] == "ended"]
    names = {f"{job.id}_{element}" if job.elements else job.id for job in jobs for element in job.elements or (0,)}
    assert sorted(ended) == sorted((name, "done") for name in names), "each job started once and did its work"
    trained = next(event for event in read_attempts(done.run) if event["event"] == "job" and event["stage"] == "train")
    assert len(set(trained["nodes"])) == 4
    assert done.manifest("train").execution["world_size"] == 4


def test_data_stages_give_the_same_bytes_as_on_one_box(done: Submitted, encoded: Path) -> None:
    local = encoded.parent / "runs/mini"
    for stage in ("shard", "tokenizer", "encode"):
        ours, theirs = (contents(folder / stage) for folder in (done.run, local))
        assert ours == theirs and len(ours) >= 3
        assert done.manifest(stage).outputs == read_manifest(local / stage).outputs


def contents(stage: Path) -> dict[str, str]:
    """Hashes of what a stage made, by path."""
    return {str(path.relative_to(stage)): sha256_file(path) for path in sorted(stage.rglob("*"))
            if path.is_file() and path.name not in OF_ONE_PROCESS and "units" not in path.relative_to(stage).parts}


def test_training_has_the_losses_of_one_process(done: Submitted, local: Path) -> None:
    ours, theirs = (read_metrics(folder / "train/metrics.jsonl") for folder in (done.run, local))
    assert len(ours) == len(theirs) == 12
    for one, other in zip(ours, theirs, strict=True):
        assert (one["step"], one["samples"]) == (other["step"], other["samples"])
        assert abs(one["loss"] - other["loss"]) < 1e-12
        assert abs(one["grad_norm"] - other["grad_norm"]) < 1e-12
    assert not audit(done.run).faults


def test_the_trained_model_evaluates_alike(done: Submitted, local: Path) -> None:
    ours, theirs = (read_json(folder / "evaluate/results.json") for folder in (done.run, local))
    assert ours["heldout"] == theirs["heldout"] and ours["heldout"]["overall"]["bits_per_byte"] > 0
    assert ours["continuations"] == theirs["continuations"]


def test_other_checkpoints_were_evaluated_in_jobs_of_their_own(done: Submitted) -> None:
    jobs = [job for job in read_chains(done.run)[0].jobs if job.kind == "evaluation"]
    assert sorted(int(job.name[-8:]) for job in jobs) == BESIDE
    assert all(not job.dependencies for job in jobs)
    found = {step: read_json(evaluation_record(done.run, step))["counts"] for step in BESIDE}
    assert found[4]["bits_per_byte"] > found[8]["bits_per_byte"] > done.manifest("evaluate").counts["bits_per_byte"]


def test_jobs_ran_the_code_of_the_submission(done: Submitted) -> None:
    snapshot = Path(read_chains(done.run)[0].code)
    assert snapshot.parent == done.run / "code"
    for stage in STAGES:
        hashes = done.manifest(stage).code
        assert hashes[f"pipeline/{stage}.py"] != sha256_file(REPOSITORY / f"pipeline/{stage}.py")
        assert {name: sha256_file(snapshot / name) for name in hashes} == hashes


def test_no_file_holds_the_shells_secrets(done: Submitted) -> None:
    assert (done.run / "report.html").is_file() and list(done.run.glob("logs/train/*/rank0.out"))
    holding = [path for path in done.run.rglob("*") if path.is_file()
               and any(secret.encode() in path.read_bytes() for secret in (TOKEN, PASSWORD, KEY))]
    assert not holding


def test_status_tells_that_all_is_done(done: Submitted) -> None:
    shown = done.type("python launch/status.py --run runs/demo", COLUMNS="150")
    rows = {line.split()[0]: line.split()[1] for line in shown.splitlines() if line.split()[:1]}
    assert {stage: rows.get(stage) for stage in STAGES} == dict.fromkeys(STAGES, "done")
    assert "12/12" in shown and "5." in shown


def test_the_rest_of_the_page_does_what_it_says(done: Submitted) -> None:
    assert "--stage all --nodes 4" in COMMANDS[0]
    before = len(read_chains(done.run))
    said = {command: done.type(command, HF_TOKEN=TOKEN) for command in COMMANDS[1:]}
    for part in ("status.py --run runs/demo --watch", "--logs runs/demo train --rank 1", "--stop", "--cancel"):
        assert any(part in command for command in said), part
    assert "step 12/12" in next(text for command, text in said.items() if command.endswith("--logs runs/demo train"))
    assert "--nodes 2" in COMMANDS[-1]
    assert "nothing to submit: all asked stages are done" in said[COMMANDS[-1]]
    assert len(read_chains(done.run)) == before


def test_the_same_command_again_submits_only_what_is_not_done(done: Submitted) -> None:
    shutil.rmtree(done.run / "report")
    done.type(COMMANDS[0], HF_TOKEN=TOKEN)
    assert [job.stage for job in done.chain.jobs] == ["report"]
    done.wait()
    assert done.manifest("report").stage == "report"


def test_evaluations_run_beside_training_and_never_hold_it_up(done: Submitted, corpus: Path, tmp_path: Path) -> None:
    """They are submitted while training waits for them, and it ends though none of them can start."""
    cluster = done.cluster
    barrier = cluster.submit(tmp_path, "true", "--hold")
    config = write_config(tmp_path, corpus, reuse=str(done.run), **merged(SETTINGS, {"launch": {
        "environment": {"DROVER_FAULTS": "wait:rank=0,step=9"}, "preflight": False,
        "evaluate": {"extra": {"dependency": f"afterany:{barrier}"}}}}))
    beside = Submitted(cluster, done.home, config, tmp_path / "runs/mini")
    beside.type(f"python launch/submit.py --config {config} --stage train --nodes 1 --cluster lab")
    train = beside.chain.jobs[0].id

    def evaluations() -> dict[int, str]:
        return {int(job.name[-8:]): job.id for job in beside.chain.jobs if job.kind == "evaluation"}

    wait_for(lambda: sorted(evaluations()) == BESIDE or not cluster.state(train).startswith(("PEND", "RUN")),
             beside.story)
    (beside.run / f"train/faults/wait-rank0-step9{GO}").touch()
    cluster.wait(train)
    assert cluster.state(train) == "COMPLETED", beside.story()
    said, jobs = Path(beside.chain.jobs[0].log).read_text(), evaluations()
    assert sorted(jobs) == BESIDE, beside.story()
    for step, job in jobs.items():
        assert said.index(f"the checkpoint of step {step} is evaluated by job {job}") < said.index("train is done")
        assert cluster.state(job) == "PENDING Dependency" and not evaluation_record(beside.run, step).exists()
    cluster.run("scancel", barrier, *jobs.values())
    beside.wait()
