"""What was submitted for a run: `launch/chain.json`, the newest submission; those before it in `launch/chains/`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.contract.manifest import GitState
from drover.pipeline.core.files import read_record, write_json

CHAIN = Path("launch") / "chain.json"
EARLIER = Path("launch") / "chains"
REPAIR = "Remove it: the submitted jobs continue, but are no longer shown."


def token(chain: str, job: str = "") -> str:
    """The first word of a job's comment in Slurm. It identifies the job even if its submission was killed before it
    could record the job. job: its key in the plan; without it, the prefix of all tokens of a submission."""
    return f"drover:{chain}:{job}"


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
        """Make this the newest submission of the run. The one before is moved to `launch/chains/`."""
        before = read_chain(run_folder)
        if before is not None and before.id != self.id:
            write_json(run_folder / EARLIER / f"{before.id}.json", asdict(before))
        write_json(run_folder / CHAIN, asdict(self))


def read_chain(run_folder: Path) -> JobChain | None:
    """The newest submission of a run; None if nothing was submitted."""
    return read_record(run_folder / CHAIN, JobChain, REPAIR)


def read_chains(run_folder: Path) -> list[JobChain]:
    """All submissions of a run, oldest first."""
    paths = [*sorted((run_folder / EARLIER).glob("*.json")), run_folder / CHAIN]  # an id begins with its time
    return [chain for path in paths if (chain := read_record(path, JobChain, REPAIR))]


def in_queue(run_folder: Path, scheduler: Scheduler) -> tuple[list[ChainJob], bool]:
    """The run's jobs in the queue, the newest first, and whether Slurm answers. If it does not: all jobs that were ever
    submitted for the run.

    A submission that was killed after sbatch may have a job that it could not record. Such jobs are found by their
    tokens, and come first.
    """
    chains = read_chains(run_folder)
    jobs = [job for chain in reversed(chains) for job in reversed(chain.jobs)]
    mine = scheduler.mine()
    answers = scheduler.jobs(job.id for job in jobs)  # another user of the run's group may have queued them
    if mine is None or answers is None:
        return jobs, False
    tokens = tuple(token(chain.id) for chain in chains)
    lost = [ChainJob(job.name, "", job.id) for job in mine if job.comment.startswith(tokens) and job.id not in answers]
    return [*lost, *(job for job in jobs if answers[job.id].queued)], True
