"""What a process knows of the launcher's job that it belongs to. The launcher passes it to each stage as `--job`. A
stage that is started by hand or by torchrun has none."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of torch.distributed, which the launcher sets for each rank."""


@dataclass(frozen=True)
class StageJob:
    """A start of a stage by the launcher.

    chain: id of the submission, or of the command on this machine; "" without a launcher.
    start: number of the start within the job.
    ranks: how many ranks were to be started; 0 for a stage without ranks.
    """

    chain: str = ""
    start: int = 0
    ranks: int = 0

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> StageJob:
        """The job that `str` gave."""
        return cls(**json.loads(text))


class _Process:
    job = StageJob()


def this_job() -> StageJob:
    """The job of this process."""
    return _Process.job


def set_this_job(job: StageJob) -> None:
    """Called once, when the command line has been read."""
    _Process.job = job
