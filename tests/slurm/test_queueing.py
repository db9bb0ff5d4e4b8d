"""Chains in the queue: resubmitted, refused, cancelled, forced, and Slurm that answers late or not at all.

Training itself is not the subject: most chains here are of stages that do nothing but wait at a gate.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.slurm.chain import Chain, read_chain
from launch.slurm.jobspec import JobSpec
from pipeline.contract.manifest import read_manifest
from pipeline.contract.stages import STAGES
from pipeline.contract.state import read_attempts, read_state
from pipeline.files import sha256_file
from tests.conftest import REPOSITORY, write_config
from tests.launch.fake_house import House, build_house
from tests.slurm.clusters import Cluster
from tests.waiting import wait_for

SETTINGS = """\
name: trial
tokenizer: {vocab_size: 1024}
launch: {cluster: lab, preflight: false}
train: {steps: 30, warmup_steps: 3, batch_tokens: 8192, micro_batch: 4}
"""
STAGE = '''
"""A stage for tests: a file `<stage>.closed` makes it wait, `<stage>.fails` makes it refuse."""
import os, signal, sys, time
from pathlib import Path
from pipeline.contract.entry import stage_main
from pipeline.errors import UserError
from pipeline.files import output_record, write_text

NAME = "{name}"
PLACE = Path(os.environ["FAKE_PIDS"])


def work(work):
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a rank's are blocked until its stage is ready
    job, restart = (os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))
    (PLACE / f"{{NAME}}-{{job}}-{{restart}}").touch()
    if (PLACE / f"{{NAME}}.fails").exists():
        raise UserError("the third record of corpus.txt is broken. Mend it.")
    while (PLACE / f"{{NAME}}.closed").exists():
        time.sleep(0.05)
    write_text(work.folder / "out.txt", NAME)
    work.commit([output_record(work.folder, work.folder / "out.txt")], {{"files": 1, "steps": 30}})


if __name__ == "__main__":
    sys.exit(stage_main(NAME, work))
'''


class Site:
    """A user with a run whose data stages are done, on a cluster."""

    def __init__(self, house: House, cluster: Cluster) -> None:
        self.house, self.cluster, self.run = house, cluster, house.run
        self.house.environment = {"PATH": os.environ["PATH"], **cluster.environment()}

    def close(self, stage: str) -> None:
        """From now on the stage waits."""
        (self.house.pids / f"{stage}.closed").touch()

    def open(self, stage: str) -> None:
        """Let the stage do its work."""
        (self.house.pids / f"{stage}.closed").unlink()

    def starts(self, stage: str) -> list[str]:
        """The starts of a stage's body, as `<job>-<restart>`."""
        return sorted(path.name.partition("-")[2] for path in self.house.pids.glob(f"{stage}-*"))

    def submit(self, stages: str, *more: str, expect: int = 0, **variables: str) -> str:
        """Call the launcher; what it printed."""
        answer = self.house.submit("--stage", stages, *more, **variables)
        assert answer.returncode == expect, answer.stdout + answer.stderr
        return answer.stdout + answer.stderr

    def control(self, script: str, *arguments: str, **variables: str) -> str:
        """Call the launcher or status.py without a configuration; what it printed."""
        answer = self.cluster.run(sys.executable, self.house.root / "launch" / script, *arguments, cwd=self.house.work,
                                  variables=variables)
        return answer.stdout

    @property
    def chain(self) -> Chain:
        chain = read_chain(self.run)
        assert chain is not None
        return chain

    def id(self, stage: str) -> str:
        """Id of the last job of a stage in the newest submission."""
        return [job.id for job in self.chain.jobs if job.stage == stage][-1]

    def states(self) -> dict[str, str]:
        """The state of each job of the newest submission, by stage."""
        return {job.stage: self.cluster.state(job.id) for job in self.chain.jobs}

    def log(self, stage: str) -> str:
        """What the newest job of a stage said."""
        return Path([job.log for job in self.chain.jobs if job.stage == stage][-1]).read_text()

    def wait(self, condition: Callable[[], Any]) -> None:
        """Wait until a condition holds."""
        wait_for(condition, lambda: story(self.run))

    def wait_until_gone(self) -> None:
        """Wait until nothing is in the queue."""
        wait_until_gone(self.cluster, self.run)


def wait_until_gone(cluster: Cluster, run: Path) -> None:
    """Wait until nothing is in the queue."""
    wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), lambda: story(run))


def story(run: Path) -> str:
    """What the jobs of a run said, for a failed assertion."""
    return "\n".join(f"==> {path}\n{path.read_text(errors='replace')[-2000:]}" for path in run.glob("logs/**/*.log"))


def gated_house(folder: Path) -> House:
    """A house with the stages above."""
    house = build_house(folder)
    for name in STAGES:
        (house.root / "pipeline" / f"{name}.py").write_text(STAGE.format(name=name))
    (house.work / "config.yaml").write_text(SETTINGS)
    (house.work / "clusters").mkdir()
    shutil.copy(REPOSITORY / "configs/clusters/lab.yaml", house.work / "clusters")
    return house


@pytest.fixture(scope="module")
def data_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder in which shard, tokenizer and encode are done."""
    house = gated_house(tmp_path_factory.mktemp("data_stages"))
    answer = house.submit("--stage", "shard,tokenizer,encode", "--cluster", "local")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return house.run


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path, data_stages: Path) -> Iterator[Site]:
    """A run of stages with gates; shard, tokenizer and encode are done. Whatever a test leaves is cancelled."""
    found = Site(gated_house(tmp_path), cluster)
    shutil.copytree(data_stages, found.run)
    yield found
    clear(cluster)


def clear(cluster: Cluster) -> None:
    """Cancel what is in the queue and wait until it is gone."""
    if jobs := set(cluster.run("squeue", "--noheader", "--format=%A").stdout.split()):
        cluster.run("scancel", *jobs)
        for job in jobs:
            cluster.wait(job)


def test_a_second_submission_is_refused_and_cancel_removes_the_chain_from_its_end(site: Site) -> None:
    site.close("train")
    site.submit("all")
    site.wait(lambda: site.starts("train"))
    shown = site.cluster.run("scontrol", "--oneliner", "show", "job", site.id("train")).stdout
    assert f"JobId={site.id('train')} " in shown and "WCKey=submitit" not in shown, "sites refuse keys that nobody has"
    again = site.submit("all", expect=2)
    assert f"in the queue already: {site.id('train')} (trial-train)" in again and "--cancel" in again
    said = site.control("submit.py", "--cancel", "runs/trial")
    ids = [site.id(stage) for stage in ("report", "evaluate", "convert", "train")]
    assert [line.split()[1] for line in said.splitlines() if line.startswith("cancelled")] == ids
    site.wait_until_gone()
    assert set(site.states().values()) == {"CANCELLED"} and not site.starts("convert")
    assert "nothing of runs/trial is in the queue" in site.control("submit.py", "--cancel", "runs/trial")
    site.open("train")
    site.submit("train,convert")
    site.wait_until_gone()
    assert read_manifest(site.run / "convert") is not None, "the cancelled chain goes on"


def test_two_submitters_never_train_at_once(site: Site) -> None:
    """Whoever does not know of the other's chain waits for its end; a job of another name is told who is there."""
    site.close("train")
    site.submit("train")
    site.wait(lambda: site.starts("train"))
    first = site.id("train")
    (site.run / "launch/chain.json").unlink()
    site.submit("train")
    second = site.id("train")
    assert site.cluster.state(second) == "PENDING Dependency"
    spec = site.run / "launch/by-hand.json"
    replace(JobSpec.load(Path(site.chain.jobs[0].spec)), name="by-hand").save(spec)
    third = site.cluster.submit(site.house.work, f"exec {sys.executable} -m launch.slurm.job.runner '{spec}'",
                                "--job-name=by-hand", PYTHONPATH=site.chain.code)
    site.cluster.wait(third)
    said = (site.house.work / f"out.{third}").read_text()
    assert site.cluster.state(third) == "FAILED" and f"The job {first} on " in said and f"scancel {first}" in said
    site.open("train")
    site.wait_until_gone()
    assert (site.cluster.state(first), site.cluster.state(second)) == ("COMPLETED", "COMPLETED")
    assert site.starts("train") == [f"{first}-0"] and "train is done" in site.log("train")


def test_nothing_starts_after_a_stage_that_failed(site: Site) -> None:
    (site.house.pids / "train.fails").touch()
    site.submit("all")
    site.wait_until_gone()
    assert site.states() == {"train": "FAILED", "convert": "CANCELLED", "evaluate": "CANCELLED", "report": "CANCELLED"}
    assert not any(site.starts(stage) for stage in ("convert", "evaluate", "report"))
    state = read_state(site.run / "train")
    assert state is not None and state.status == "failed" and "third record" in state.reason
    assert "third record of corpus.txt is broken" in site.log("train")
    shown = site.control("status.py", "--run", "runs/trial")
    assert "failed" in shown and "third record" in shown
    (site.house.pids / "train.fails").unlink()
    site.submit("train,convert")
    site.wait_until_gone()
    assert set(site.states().values()) == {"COMPLETED"}


def test_slurm_that_does_not_answer_keeps_nobody_from_submitting(site: Site, tmp_path: Path) -> None:
    """squeue hangs and there is no sacct: a second submission is let through, and waits for the first."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("squeue", "exec sleep 600"), ("sacct", "echo 'sacct: command not found' >&2; exit 127")):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    path = f"{tools}:{site.house.environment['PATH']}"
    site.close("train")
    site.submit("train", PATH=path)
    site.wait(lambda: site.starts("train"))
    first = site.id("train")
    assert "does not say whether jobs of this run are queued" in site.submit("train", PATH=path)
    assert site.cluster.state(site.id("train")) == "PENDING Dependency"
    shown = site.control("status.py", "--run", "runs/trial", PATH=path)
    assert "Slurm does not answer" in shown and "train" in shown
    site.open("train")
    site.wait_until_gone()
    assert site.starts("train") == [f"{first}-0"] and set(site.states().values()) == {"COMPLETED"}


def test_force_rebuilds_a_finished_stage_once_also_when_its_job_is_queued_again(site: Site) -> None:
    site.submit("train")
    site.wait_until_gone()
    done = read_manifest(site.run / "train")
    site.close("train")
    site.submit("train", "--force")
    job = site.id("train")
    site.wait(lambda: f"{job}-0" in site.starts("train"))
    site.cluster.run("scontrol", "requeue", job)
    site.wait(lambda: f"{job}-1" in site.starts("train"))
    site.open("train")
    site.wait_until_gone()
    rebuilt = read_manifest(site.run / "train")
    assert done is not None and rebuilt is not None and rebuilt.finished >= done.finished
    aside = list(site.run.glob("train.replaced-*"))
    assert len(aside) == 1 and read_manifest(aside[0]) == done, "set aside once, by the first start"
    assert "nothing to submit" in site.submit("train")


@pytest.fixture
def tokenized(tmp_path: Path, corpus: Path, encoded: Path, cluster: Cluster) -> Iterator[Path]:
    """Config of a real run on the cluster whose shard and tokenizer stages are done."""
    config = write_config(tmp_path, corpus, launch={"processes": 1})
    for stage in ("shard", "tokenizer"):
        shutil.copytree(encoded.parent / "runs/mini" / stage, tmp_path / "runs/mini" / stage)
    yield config
    clear(cluster)


def test_of_an_array_with_a_failed_element_only_that_one_is_done_again(
        cluster: Cluster, tokenized: Path, tmp_path: Path) -> None:
    """One element is killed; what waited for the array goes. The same command does that element, and the rest."""
    mended, wrapper, run = tmp_path / "mended", tmp_path / "wrapper", tmp_path / "runs/mini"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *"--part 1/3"*) [ -e {mended} ] || kill -9 $$;; esac\nexec "$@"\n')
    wrapper.chmod(0o755)
    command = (sys.executable, REPOSITORY / "launch/submit.py", "--config", tokenized, "--cluster", "lab",
               "launch.encode.array=3", "launch.max_restarts=0", f"launch.wrap=[{wrapper}]",
               "launch.preflight=false", "train.steps=2", "train.warmup_steps=1")

    def submitted(stages: str, *more: str) -> dict[str, str]:
        cluster.run(*command, "--stage", stages, *more, cwd=tmp_path)
        chain = read_chain(run)
        assert chain is not None
        wait_until_gone(cluster, run)
        return {job.kind if job.stage == "encode" else job.stage: job.id for job in chain.jobs}

    first = submitted("encode,train")
    elements = {index: cluster.state(f"{first['array']}_{index}") for index in range(3)}
    assert elements == {0: "COMPLETED", 1: "FAILED", 2: "COMPLETED"}
    assert (cluster.state(first["finalise"]), cluster.state(first["train"])) == ("CANCELLED", "CANCELLED")
    assert "killed by SIGKILL" in (run / f"logs/slurm/{first['array']}_1.log").read_text()
    before = made(run)
    assert before and not (run / "train").exists()

    mended.touch()
    second = submitted("encode,train")
    chain = read_chain(run)
    assert chain is not None and [job.elements for job in chain.jobs if job.kind == "array"] == [(1,)]
    assert {job: cluster.state(job) for job in second.values()} == dict.fromkeys(second.values(), "COMPLETED")
    after = made(run)
    assert {name: after[name] for name in before} == before, "what was done is untouched"
    assert set(after) > set(before) and read_manifest(run / "train") is not None

    third = submitted("encode", "--force")
    hashes = {name: content for name, (_, content) in after.items()}
    rebuilt = made(run)
    assert {name: content for name, (_, content) in rebuilt.items()} == hashes
    assert all(rebuilt[name][0] != after[name][0] for name in after), "all of it was made again"
    starts = [event["job"] for event in read_attempts(run) if event["event"] == "attempt"
              and event["job"].startswith(f"{third['array']}_")]
    assert sorted(starts) == [f"{third['array']}_{index}" for index in range(3)], "and once"


def made(run: Path) -> dict[str, tuple[int, str]]:
    """When encode's token shards were written, and their hashes, by path."""
    return {str(path.relative_to(run)): (path.stat().st_mtime_ns, sha256_file(path))
            for path in sorted((run / "encode").rglob("*")) if path.suffix == ".arrow"}
