"""The launcher in this process: plans, refusals, and what Slurm would get. It starts no stage."""

from __future__ import annotations

import io
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from drover.launch.slurm import submission
from drover.launch.slurm.chain import JobChain, read_chain
from drover.launch.slurm.submission import snapshot_of, take_snapshot
from drover.launch.submit import main
from drover.pipeline.config.loading import config_hash, load_config
from drover.pipeline.contract.manifest import STARTED, Manifest
from drover.pipeline.contract.run import Run, code_hashes
from drover.pipeline.contract.stages import REPOSITORY, STAGES
from drover.pipeline.core.console import Program
from drover.pipeline.core.files import output_record, sha256_json, write_json, write_text
from tests.launch.recorded_slurm import NO_CONTROLLER, NO_DATABASE, Programs

SETTINGS = ("name: trial\ntokenizer: {vocab_size: 1024}\nlaunch: {processes: 2}\n"
            "train: {steps: 30, warmup_steps: 3, batch_tokens: 8192, micro_batch: 4}\n")
SBATCH = """\
n=$(($(ls "$QUEUE" | grep -vc environment) + 101))
[ "$n" = "$REFUSED" ] && { echo "sbatch: error: invalid partition" >&2; exit 1; }
cp "$1" "$QUEUE/$n"
env | grep -E '^(SLURM|SBATCH)' > "$QUEUE/$n.environment" || rm "$QUEUE/$n.environment"
echo "Submitted batch job $n"
"""


def git(folder: Path, *arguments: str) -> str:
    """Call git in a folder; what it printed."""
    return subprocess.run(["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True,
                          capture_output=True, text=True).stdout


def commit(folder: Path) -> None:
    """Make a folder a repository, with all its files in a commit."""
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all")


def copied(run: Path, checkout: Path) -> Path:
    """The copy of a checkout's code in a run folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "REPOSITORY", checkout)
        code, files = snapshot_of(run)
    take_snapshot(code, files)
    return code


def holding(folder: Path, *secrets: str) -> list[Path]:
    """Files below a folder in which one of these stands."""
    return [path for path in folder.rglob("*") if path.is_file()
            and any(secret.encode() in path.read_bytes() for secret in secrets)]


def planned(shown: str) -> dict[str, dict[str, Any]]:
    """The parameters of submitit that a dry run prints, by the job's key; `additional_parameters` among the others."""
    results = {}
    for part in shown.split("# ---- ")[1:]:
        job = yaml.safe_load(part.partition("\n")[2])
        results[part.partition(":")[0]] = {**job, **job["additional_parameters"]}
    return results


class Launcher:
    """A user in the folder `work` with a `config.yaml`, whose run is runs/trial; its stages read no outside files.

    Attributes:
        checkout: what jobs get a copy of: little more than the program that looks at it.
        queue: what sbatch took, by job id, once there is Slurm (`with_slurm`). programs: Slurm's.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.work, self.checkout, self.queue = folder / "a folder", folder / "checkout", folder / "queue"
        self.programs = Programs(folder / "bin")
        for place in (self.work, self.checkout / "launch/slurm", self.queue):
            place.mkdir(parents=True)
        shutil.copy(REPOSITORY / "launch/slurm/trust.py", self.checkout / "launch/slurm")
        (self.work / "config.yaml").write_text(SETTINGS)
        patch.chdir(self.work)
        for name, stage in list(STAGES.items()):
            kept = {key: module for key, module in stage.functions.items() if key == "problems"}
            patch.setitem(STAGES, name, replace(stage, functions=kept))
        for name in [name for name in os.environ if name.startswith(("SLURM", "RANK", "WORLD_SIZE", "OMP_NUM"))]:
            patch.delenv(name)
        patch.setenv("PATH", "/nowhere")  # no Slurm and no GPU, whatever this machine has
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("QUEUE", str(self.queue))
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setattr(submission, "REPOSITORY", self.checkout)

    @property
    def run(self) -> Path:
        """The run folder of `config.yaml`."""
        return self.work / "runs" / "trial"

    def with_slurm(self, patch: pytest.MonkeyPatch) -> Launcher:
        """Put a Slurm on PATH whose queue is empty."""
        self.programs.do("sbatch", SBATCH)
        self.programs.say("srun", status=1)
        for program in ("scontrol", "sinfo"):  # this machine's own would look for a controller
            self.programs.say(program, error=NO_CONTROLLER, status=1)
        self.programs.say("sacct", error=NO_DATABASE, status=1)
        self.programs.queue()
        patch.setenv("PATH", f"{self.programs.folder}:/usr/bin:/bin")
        return self

    def call(self, *arguments: str, program: Program = main, **variables: str) -> subprocess.CompletedProcess[str]:
        """Call the launcher, or another program; its exit status and what it printed."""
        before = os.umask(0o022)
        os.umask(before)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out, \
                redirect_stderr(io.StringIO()) as errors:
            patch.setattr(sys, "argv", ["launch/submit.py", *arguments])
            for name, value in variables.items():
                patch.setenv(name, value)
            try:
                status = program(list(arguments))
            finally:
                os.umask(before)
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), errors.getvalue())

    def submit(self, words: str, *settings: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Call it with the configuration. words: as a user types them. settings: more of them, with blanks."""
        return self.call("--config", "config.yaml", *shlex.split(words), *settings, **variables)

    def accepted(self, words: str, *settings: str, **variables: str) -> str:
        """Call it with what it does; what it printed."""
        result = self.submit(words, *settings, **variables)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def refused(self, words: str, *settings: str, **variables: str) -> str:
        """Call it with what it refuses; its complaint."""
        result = self.submit(words, *settings, **variables)
        assert result.returncode == 2, result.stdout
        return result.stderr

    @property
    def chain(self) -> JobChain | None:
        """The newest submission of the run."""
        return read_chain(self.run)

    def task(self, job: str) -> Any:
        """What submitit pickled for a job."""
        return pickle.loads((self.run / f"launch/submitit/{job}_submitted.pkl").read_bytes()).function

    def done(self, *stages: str) -> None:
        """Stages that are done as the configuration asks for them."""
        run = Run(load_config(self.work / "config.yaml"))
        for stage in stages:
            folder, fingerprint = run.own_folder(stage), run.fingerprint(stage)
            write_json(folder / STARTED, {"fingerprint": fingerprint})
            write_text(folder / "out.txt", sha256_json([stage, fingerprint]))
            Manifest(stage, fingerprint, [output_record(folder, folder / "out.txt")], {"files": 1, "steps": 30},
                     config_hash(run.config), code=code_hashes(STAGES[stage])).write(folder)
