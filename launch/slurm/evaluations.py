"""Evaluations of checkpoints during training, in separate jobs. Which are pending follows from the run folder.

    python -m drover.launch.slurm.evaluations --run RUN --step STEP

is such a job. `evaluations/step-<step>/` is a run folder that reuses the run's data stages. Its stage train is a link
to the checkpoint, which training keeps until the evaluation is done. The manifest of its stage evaluate records that it
is done; its weights are then removed.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from drover.launch.plan import Job, Options, evaluation, local_ranks
from drover.launch.processes import Say, run_here
from drover.launch.slurm.chain import read_chain, read_chains, token
from drover.launch.slurm.jobspec import JobSpec
from drover.launch.slurm.scheduler import Scheduler
from drover.launch.slurm.submit.sbatch import submit_job
from drover.pipeline.config.loading import config_hash, load_config, save_config
from drover.pipeline.config.plugins import add_run_and_plugins
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.contract.manifest import Manifest, read_manifest
from drover.pipeline.contract.run import Run, run_in
from drover.pipeline.contract.state import now
from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.command_line import Parser, Program
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record, sha256_file
from drover.pipeline.records.checkpoints import (
    CHECKPOINTS,
    MARKER,
    checkpoint_name,
    complete_checkpoints,
    read_marker,
    step_of,
)
from drover.pipeline.records.pending_evaluations import evaluation_folder, evaluation_record, is_owed

TRIES = 2
"""Jobs for one checkpoint in one submission."""
EVERY_S = 20.0


def owed(run_folder: Path, config: Config) -> list[int]:
    """Steps of complete checkpoints that `launch.evaluate.every_checkpoints` selects and that have no result, oldest
    first. The chain itself evaluates the checkpoint of the last step."""
    if config.launch.evaluate.every_checkpoints is None:
        return []
    finished = read_manifest(run_folder / "train")
    last = finished.counts["steps"] if finished else None
    steps = map(step_of, complete_checkpoints(run_folder / "train"))
    return [step for step in steps if step != last and is_owed(run_folder, config, step)]


def pending(config: Config, options: Options, tried: Sequence[str] = ()) -> list[Job]:
    """The jobs for pending evaluations, without those in the queue and those that were tried too often.

    tried: names of jobs of this submission.

    Raises:
        UserError: squeue does not answer.
    """
    jobs = [evaluation(config, options, step) for step in owed(config.folder, config)]
    queued = Scheduler().mine() if jobs else []
    if queued is None:
        raise UserError("squeue does not answer, so Drover cannot know which checkpoints are being evaluated already. "
                        "Try again when it answers.")
    # By their tokens: a run of the same name in another folder has jobs of the same names.
    known, chains = {job.comment.partition(" ")[0] for job in queued}, read_chains(config.folder) if jobs else []
    return [job for job in jobs if tried.count(job.name) < TRIES
            and not any(token(chain.id, job.key) in known for chain in chains)]


# ---- the job


def prepare(run: Run, step: int) -> Path:
    """Make the run folder for the evaluation of a checkpoint; the path of its configuration.

    Raises:
        UserError: there is no complete checkpoint of this step.
    """
    folder, name = evaluation_folder(run.folder.absolute(), step), f"{CHECKPOINTS}/{checkpoint_name(step)}"
    config = changed(run.config, {"name": folder.name, "runs_dir": str(folder.parent),
                                  "reuse": str(run.folder.absolute()), "convert.copy_to": None})
    source, target = run.folder.absolute() / "train" / name, folder / "train" / name
    if not (source / MARKER).exists():
        raise UserError(f"{source} is not a complete checkpoint, so it cannot be evaluated. Evaluate another step: "
                        f"`ls {source.parent}` shows them.")
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()  # to where the run may have been before
    if not target.exists():  # `cp -rL` copies the checkpoint itself
        target.symlink_to(source, target_is_directory=True)
    marker, sub = read_marker(target), Run(config)
    save_config(config, folder / "config.yaml")
    # What later stages read of a finished stage train, for this checkpoint.
    progress = marker["progress"]
    model = config.model.with_vocabulary(sub.finished("tokenizer").counts["vocab_size"])
    outputs = [{**file, "path": f"{name}/{file['path']}"} for file in marker["files"]]
    Manifest(
        stage="train", fingerprint=sub.fingerprint("train"), config_sha256=config_hash(config),
        outputs=[*outputs, output_record(folder / "train", target / MARKER)],
        counts={"checkpoint": name, "steps": progress["step"], "tokens": progress["tokens"],
                "samples": progress["samples"], "parameters": model.parameter_count, "vocab_size": model.vocab_size,
                "precision": progress["precision"], "ranks": marker["world_size"]},
        drift=run.begun_drift("train"), started=now(), finished=now()).write(folder / "train")
    return folder / "config.yaml"


def evaluate(run_folder: Path, step: int) -> int:
    """Convert and evaluate a checkpoint; the exit status of the first stage that fails, or 0."""
    if evaluation_record(run_folder, step).exists():
        echo(f"the checkpoint of step {step} is already evaluated")
        return 0
    run = run_in(run_folder.absolute())
    path = prepare(run, step)
    # Training's inputs may have changed since it started. That is to be solved when training is next requested.
    environment = {**os.environ, "DROVER_CONTINUES": "1"}
    for command, ranks in commands(run.config, path):
        if status := run_here(command, environment, ranks=ranks).status:
            return status
    if not evaluation_record(run_folder, step).exists():
        return 1
    # Keep the results, not the weights.
    folder = evaluation_folder(run_folder, step)
    for weights in (folder / "train" / CHECKPOINTS, folder / "convert" / "hf"):
        shutil.rmtree(weights, ignore_errors=True)
    return 0


def commands(config: Config, path: Path) -> list[tuple[list[str], int]]:
    """The commands of an evaluation, each with its number of ranks; evaluate has one per GPU, as on one machine."""
    from drover.launch.local import find_machine

    return [([sys.executable, "-m", f"drover.pipeline.{stage}", "--config", str(path)], ranks) for stage, ranks in
            (("convert", 0), ("evaluate", local_ranks(config, find_machine(config.launch.device))))]


# ---- from the train job


class Evaluations:
    """Submits the jobs of pending evaluations, for the runner of a train job. It works in a thread and never delays
    training; each failure is logged once."""

    def __init__(self, spec: JobSpec, say: Say) -> None:
        self.spec, self._say = spec, say
        self._worker = BackgroundWorker[None]("evaluations", self._submit_owed, newest_only=True)
        self._next = 0.0
        self._said: set[str] = set()

    def look(self) -> None:
        """Submit what is pending, at most once in `EVERY_S`."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            self._worker.put(None)

    def finish(self, patience_s: float = 60.0) -> None:
        """Submit what is pending a last time, and wait for that at most so long."""
        self._worker.put(None)  # one in progress may have started before the last checkpoint was complete
        self._worker.wait(patience_s)

    @cached_property
    def config(self) -> Config:
        """The configuration of the submission, with its plugins. Its commands go into the scripts of jobs."""
        if changed := [path for path, sha256 in self.spec.files.items() if sha256_file(Path(path)) != sha256]:
            raise UserError(f"{', '.join(changed)} changed after the submission.")
        return load_config(next(iter(self.spec.files)), check=False)

    def to_submit(self) -> list[Job]:
        """Jobs for pending evaluations, with the code and the configuration of the submission."""
        spec, chain = self.spec, read_chain(Path(self.spec.run))
        options = Options("slurm", "", chain=spec.chain, code=spec.code)
        jobs = pending(self.config, options, [job.name for job in chain.jobs]) if chain else []
        return [replace(job, command=(spec.command[0], *job.command[1:]), files=spec.files) for job in jobs]

    def submit(self, job: Job) -> str:
        """Submit one job; its id."""
        return submit_job(self.config, job, {}).id

    def _submit_owed(self, _: None) -> None:
        jobs = list[Job]()
        with self._told("checkpoints are"):
            jobs = self.to_submit()
        for job in jobs:
            what = f"the checkpoint of step {int(job.name.rpartition('-')[2])} is"
            with self._told(what):
                self._say(f"{what} evaluated by job {self.submit(job)}")

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Log a failure, once for each text."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a library raises, training continues
            kind = "" if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: "
            text = f"{what} not evaluated for now, training continues: {kind}{str(error).strip()}"
            if text not in self._said:
                self._said.add(text)
                self._say(text)


def add_options(parser: Parser) -> None:
    """The options."""
    add_run_and_plugins(parser)
    parser.add_argument("--step", required=True, type=int, help="of the checkpoint")


main = Program("python -m drover.launch.slurm.evaluations", "Evaluate a checkpoint here.", add_options,
               lambda options: evaluate(options.run, options.step))

if __name__ == "__main__":
    sys.exit(main())
