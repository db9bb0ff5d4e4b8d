"""What was submitted for a run: `launch/chain.json`, the newest submission."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.contract.manifest import GitState
from drover.pipeline.core.files import read_record, sha256_json, write_json

CHAIN = Path("launch") / "chain.json"
REPAIR = "Remove it: the submitted jobs continue, but are no longer shown."


def mark(run_folder: Path) -> str:
    """A word for the run in Slurm, where runs of other folders may have its name: in the comments of its jobs, by which
    they are found although their submission was killed before it could record them, and in the name that singleton
    goes by."""
    return sha256_json(str(run_folder.resolve()))[:8]


@dataclass(frozen=True)
class ChainJob:
    """A job that Slurm accepted. elements: submitted indices of an array; None for a job that is no array."""

    name: str
    stage: str
    id: str
    elements: tuple[int, ...] | None = None
    dependencies: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobChain:
    """One submission: its jobs in the order of their dependencies, and what they were made from. planned: how many
    jobs it is to have. refused: why it ended before it had them."""

    id: str
    submitted: str
    command: tuple[str, ...]
    git: GitState
    config: str
    code: str
    jobs: tuple[ChainJob, ...] = ()
    planned: int = 0
    refused: str = ""

    @property
    def partial(self) -> bool:
        """Whether jobs are missing: the submission is at work, or it failed."""
        return len(self.jobs) < self.planned

    def write(self, run_folder: Path) -> None:
        """Make this the newest submission of the run."""
        write_json(run_folder / CHAIN, asdict(self))


def read_chain(run_folder: Path) -> JobChain | None:
    """The newest submission of a run; None if nothing was submitted."""
    return read_record(run_folder / CHAIN, JobChain, REPAIR)


def in_queue(run_folder: Path, scheduler: Scheduler) -> tuple[list[ChainJob], bool]:
    """The run's jobs in the queue, the newest first, and whether Slurm answers. If it does not: all jobs of the newest
    submission.

    Jobs that no submission recorded, or an earlier one, are found by their comments, and come first.
    """
    chain = read_chain(run_folder)
    jobs = [*reversed(chain.jobs)] if chain else []
    mine = scheduler.mine()
    answers = scheduler.jobs(job.id for job in jobs)  # another user of the run's group may have queued them
    if mine is None or answers is None:
        return jobs, False
    others = [ChainJob(job.name, "", job.id) for job in mine
              if job.comment.startswith(f"drover:{mark(run_folder)}:") and job.id not in answers]
    return [*others, *(job for job in jobs if answers[job.id].queued)], True
