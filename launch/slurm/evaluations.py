"""Checkpoints that are owed a conversion and an evaluation: found from what lies in the run folder, done in jobs of
their own beside training.

    python -m launch.slurm.evaluations --run RUN --step STEP [--keep]

is such a job. `evaluations/step-<step>/` is a run folder of its own that reuses the run's data stages and whose train
stage is the checkpoint, hard-linked, so that training may remove its own name for it. The manifest of its stage
evaluate is the record that nothing is owed any more; the weights are cleared then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from launch.plan import local_ranks
from launch.processes import Processes
from launch.slurm.chain import read_chain
from launch.slurm.jobspec import JobSpec
from launch.slurm.scheduler import Scheduler, of_another_job
from pipeline.config.loading import config_hash, read_without_plugins, save_config
from pipeline.config.plugins import add_run_options
from pipeline.config.tree import Config
from pipeline.contract.manifest import Manifest, read_manifest
from pipeline.contract.run import Run, run_in
from pipeline.contract.state import now
from pipeline.errors import UserError
from pipeline.files import output_record
from pipeline.records.checkpoints import (
    CHECKPOINTS,
    MARKER,
    checkpoint_name,
    complete_checkpoints,
    read_marker,
    step_of,
)
from pipeline.records.pending_evaluations import evaluation_folder, evaluation_record

TRIES = 2
"""Jobs for one checkpoint in one submission."""
EVERY_S = 20.0
PATIENCE_S = 120
Found = TypeVar("Found")


def owed(run_folder: Path, every_steps: int, final_step: int | None = None) -> list[int]:
    """Complete checkpoints at multiples of `every_steps` without a result, oldest first. That of the last step is
    evaluated by the chain itself."""
    finished = read_manifest(run_folder / "train")
    last = {final_step, finished.counts["steps"] if finished else None}
    steps = map(step_of, complete_checkpoints(run_folder / "train"))
    return sorted(step for step in steps if step > 0 and step % every_steps == 0 and step not in last
                  and not evaluation_record(run_folder, step).exists())


# ---- the job


def prepare(run: Run, step: int) -> Path:
    """Make the run folder for the evaluation of a checkpoint; the path of its configuration.

    Raises:
        UserError: the checkpoint is not there (any more).
    """
    folder, name = evaluation_folder(run.folder.absolute(), step), f"{CHECKPOINTS}/{checkpoint_name(step)}"
    config = run.config.model_copy(update={
        "name": folder.name, "runs_dir": str(folder.parent), "reuse": str(run.folder.absolute()),
        "convert": run.config.convert.model_copy(update={"copy_to": None})})
    source, target = run.folder.absolute() / "train" / name, folder / "train" / name
    if not (target / MARKER).exists():
        _link(source, target)
    marker, sub = read_marker(target), Run(config)
    save_config(config, folder / "config.yaml")
    # What the stages after train read of a finished one, for the checkpoint as it is.
    progress = marker["progress"]
    vocabulary_size = int(sub.finished("tokenizer").counts["vocab_size"])
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or vocabulary_size})
    outputs = [{**file, "path": f"{name}/{file['path']}"} for file in marker["files"]]
    Manifest(
        stage="train", fingerprint=sub.fingerprint("train"), config_sha256=config_hash(config),
        outputs=[*outputs, output_record(folder / "train", target / MARKER)],
        counts={"checkpoint": name, "steps": progress["step"], "tokens": progress["tokens"],
                "samples": progress["samples"], "parameters": model.parameter_count, "vocab_size": model.vocab_size,
                "precision": progress["precision"], "ranks": marker["world_size"]},
        drift=run.begun_drift("train"), started=now(), finished=now()).write(folder / "train")
    return folder / "config.yaml"


def _link(source: Path, target: Path) -> None:
    """Give the checkpoint's files a second name, the marker last; where that cannot be, the folder a symbolic one."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()
    try:
        for file in sorted(source.rglob("*"), key=lambda path: path.name == MARKER):
            if file.is_file():
                place = target / file.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, place)
    except FileNotFoundError:  # it is being removed
        pass
    except OSError:  # another file system, or one without hard links
        shutil.rmtree(target, ignore_errors=True)
        target.symlink_to(source, target_is_directory=True)
    if not (target / MARKER).exists():
        raise UserError(f"{source} is not a complete checkpoint (any more), so it cannot be evaluated.")


def evaluate(run_folder: Path, step: int, *, keep: bool = False) -> int:
    """Convert and evaluate a checkpoint; the exit status of the first stage that fails, or 0."""
    if evaluation_record(run_folder, step).exists():
        print(f"the checkpoint of step {step} has its result already", flush=True)
        return 0
    run = run_in(run_folder.absolute())
    path = prepare(run, step)
    # What training was made of may have changed since it began: that is for the next who asks for it to mend.
    environment = {**os.environ, "DROVER_CONTINUES": "1"}
    for command, ranks in commands(run.config, path):
        if status := Processes(command, environment, ranks=ranks, shown=True).run():
            return status
    if not evaluation_record(run_folder, step).exists():
        return 1
    if not keep:
        clear(run_folder, step)
    return 0


def commands(config: Config, path: Path) -> list[tuple[list[str], int]]:
    """The stages of an evaluation, each with its ranks; evaluate with a rank per GPU, as on one box."""
    from launch.local import find_machine

    return [([sys.executable, "-m", f"pipeline.{stage}", "--config", str(path)], ranks) for stage, ranks in
            (("convert", 0), ("evaluate", local_ranks(config, find_machine())))]


def clear(run_folder: Path, step: int) -> None:
    """Remove the weights of a checkpoint that has its result; the results stay."""
    folder = evaluation_folder(run_folder, step)
    checkpoint = folder / "train" / CHECKPOINTS / folder.name
    if checkpoint.is_symlink():
        checkpoint.unlink()
    for path in (folder / "train" / CHECKPOINTS, folder / "convert" / "hf"):
        shutil.rmtree(path, ignore_errors=True)


# ---- beside training


class Evaluations:
    """Submits jobs for what is owed, from the runner of a train job, and never holds it up: all happens in a thread,
    and what goes wrong is said once."""

    def __init__(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        self.spec, self.run_folder, self._say = spec, Path(spec.run), say
        self._thread: threading.Thread | None = None
        self._next = 0.0
        self._said: set[str] = set()

    def look(self) -> None:
        """See to what is owed, now and then."""
        if time.monotonic() < self._next or (self._thread is not None and self._thread.is_alive()):
            return
        self._next = time.monotonic() + EVERY_S
        self._thread = threading.Thread(target=self._submit_owed, name="evaluations", daemon=True)
        self._thread.start()

    def finish(self, patience_s: float = 60.0) -> None:
        """See to it a last time, for a while at most."""
        until = time.monotonic() + patience_s
        for again in (True, True, False):
            if self._thread is not None:
                self._thread.join(max(0.0, until - time.monotonic()))
            if again:
                self._next = 0.0
                self.look()

    def _submit_owed(self) -> None:
        for step in self._tried("checkpoints are not evaluated for now", self.to_submit) or []:
            job = self._tried(f"the checkpoint of step {step} is not evaluated for now",
                              partial(submit_apart, self.spec, step))
            if job is not None:
                self._say(f"the checkpoint of step {step} is evaluated by job {job}")

    def _tried(self, what: str, work: Callable[[], Found]) -> Found | None:
        try:
            return work()
        except (UserError, OSError, subprocess.SubprocessError, ValueError) as error:
            text = f"{what}, training goes on: {str(error).strip()}"
            if text not in self._said:
                self._said.add(text)
                self._say(text)
            return None

    def to_submit(self) -> list[int]:
        """Steps that are owed and have no job in the queue and tries left."""
        if not (self.run_folder / "config.yaml").exists():
            return []
        from launch.slurm.submit.sbatch import evaluation_name

        config = read_without_plugins(self.run_folder / "config.yaml")
        every = self.spec.every_checkpoints * config.train.checkpoint.every_steps
        steps = owed(self.run_folder, every, config.train.steps)
        chain = read_chain(self.run_folder)
        if not steps or chain is None:
            return []
        tried = [job.name for job in chain.jobs if job.kind == "evaluation"]
        queued = Scheduler().mine()
        if queued is None:
            raise OSError("Slurm does not say which jobs are in the queue")
        unfit = {name for name in tried if tried.count(name) >= TRIES} | {job.name for job in queued}
        return [step for step in steps if evaluation_name(config.name, step) not in unfit]


def submit_apart(spec: JobSpec, step: int) -> str:
    """Submit the job of a checkpoint from a process that has nothing of this job in its environment; the job's id."""
    foreign = of_another_job(os.environ)
    environment = {name: value for name, value in os.environ.items()
                   if name not in foreign and not name.startswith(("MASTER_", "DROVER_"))}
    given = [spec.command[0], spec.environment, spec.files, spec.code_sha256]
    answer = subprocess.run([sys.executable, "-m", "launch.slurm.evaluations", "--run", spec.run, "--step", str(step),
                             "--submit"], input=json.dumps(given), env=environment, capture_output=True, text=True,
                            timeout=PATIENCE_S, check=False)
    if answer.returncode:
        raise OSError((answer.stderr.strip().splitlines() or ["the submission failed"])[-1])
    return answer.stdout.split()[-1]


def main(arguments: list[str]) -> int:
    """Evaluate a checkpoint here, or submit the job that does."""
    parser = argparse.ArgumentParser(prog="python -m launch.slurm.evaluations")
    add_run_options(parser)
    parser.add_argument("--step", required=True, type=int, help="of the checkpoint")
    parser.add_argument("--keep", action="store_true", help="keep the exported model")
    parser.add_argument("--submit", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if not options.submit:
            return evaluate(options.run, options.step, keep=options.keep)
        from launch.slurm.submit.sbatch import submit_evaluation
        print(submit_evaluation(options.run, options.step, *json.load(sys.stdin)).id)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return UserError.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
