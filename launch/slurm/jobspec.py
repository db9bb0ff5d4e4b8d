"""What a Slurm job has to do, as a file in the run folder: written at submission, read by the runner."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_record, write_text


@dataclass(frozen=True)
class JobSpec:
    """What a job does. A planned job (`drover.launch.plan.Job`) is one that also knows where it stands in its plan.

    Attributes:
        run: absolute path of the run folder.
        chain: id of the submission; `--force` counts once for it.
        name: Slurm's name of the job.
        command: of the stage, without what only the job knows (its part, its rank).
        ranks: processes under torch.distributed over all nodes; 0 for a stage that has none.
        parts: elements into which an array cuts the `phase` of the stage, whose units they share; 0: no array.
        link, links: which of how many jobs that go on with the same stage, from 1.
        wrap: a command that the stage is started with, such as a container's. srun_args: more options of srun.
        contained: whether a container starts the stage, which may not see the folders of its node.
        health_check: a site's test of a node.
        requeue: whether the job may queue itself again.
        signal_s: seconds before the time limit at which Slurm tells the ranks to save and leave.
        max_restarts: restarts in a row without a new checkpoint, after which the stage is given up.
        every_checkpoints: evaluate every so many checkpoints in jobs of their own; 0: none.
        code, code_sha256: folder of the copy of the code, and the hash that the archive beside it must have; empty: not
            known.
        files: hashes of other files that the job reads and that decide what it does: the frozen configuration first,
            then its plugins with the modules beside them.
        trusted_group, check_owners: who may write what is executed from the run folder (`drover.launch.slurm.trust`).
    """

    name: str
    stage: str
    command: tuple[str, ...]
    run: str
    chain: str
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 0
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    parts: int = 0
    phase: str = ""
    link: int = 1
    links: int = 1
    wrap: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    contained: bool = False
    health_check: tuple[str, ...] = ()
    requeue: bool = True
    signal_s: int = 120
    max_restarts: int = 3
    preflight: bool = False
    every_checkpoints: int = 0
    code: str = ""
    code_sha256: str = ""
    files: dict[str, str] = field(default_factory=dict)
    trusted_group: str | None = None
    check_owners: bool = True

    @property
    def folder(self) -> Path:
        """The stage's folder."""
        return Path(self.run) / self.stage

    @property
    def text(self) -> str:
        """What is written: of a planned job no more than what it does."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(JobSpec)}, indent=1)

    @property
    def later_links(self) -> bool:
        """Whether another job of the chain waits to go on with the same stage."""
        return self.link < self.links

    @property
    def sha256(self) -> str:
        """Hash of the file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the file."""
        write_text(path, self.text)

    @classmethod
    def load(cls, path: Path, sha256: str = "") -> JobSpec:
        """Read what `save` wrote.

        Raises:
            UserError: it is missing or damaged, or its content does not have the hash `sha256`.
        """
        spec = read_record(path, cls, "Submit the same command again.")
        if spec is None or (sha256 and spec.sha256 != sha256):
            raise UserError(f"{path}, what the job has to do, is {'not what was submitted' if spec else 'missing'}. "
                            f"Submit the same command again.")
        return spec
