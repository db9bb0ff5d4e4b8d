"""The task of a Slurm job, as a file in the run folder: written at submission, read by the runner."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Self

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_record, write_json


@dataclass(frozen=True)
class JobSpec:
    """What a job does. A planned job (`drover.launch.plan.Job`) adds its place in the plan.

    Attributes:
        run: absolute path of the run folder.
        chain: id of the submission; `--force` counts once for it.
        name: Slurm's name of the job.
        command: of the stage, without what only the job knows (its name, its rank).
        ranks: processes under torch.distributed over all nodes; 0 for a stage without ranks.
        nodes: of the next start. node_counts: numbers of nodes on which the stage can run, the wanted one first; empty:
            only `nodes`. spare_nodes: nodes of the job beyond the wanted number.
        link, links: number of this job, from 1, and of all jobs that continue the same stage one after another.
        wrap: a command that starts the stage, such as a container's. srun_args: more options of srun.
        health_check: a site's test of a node.
        requeue: whether the job may requeue itself.
        signal_s: seconds before the time limit at which Slurm signals the ranks to save and end.
        max_restarts: restarts in a row without a new checkpoint after which the stage fails.
        code: folder of the copy of the code.
        files: hashes of other files that decide what the job does: the frozen configuration, its plugins, and the
            modules in their folders.
        check_owners: whether others must not own or write what is executed (`drover.launch.slurm.trust`).
    """

    name: str
    stage: str
    command: tuple[str, ...]
    run: str
    chain: str
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 0
    nodes: int = 1
    node_counts: tuple[int, ...] = ()
    spare_nodes: int = 0
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    link: int = 1
    links: int = 1
    wrap: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    health_check: tuple[str, ...] = ()
    requeue: bool = True
    signal_s: int = 120
    max_restarts: int = 3
    preflight: bool = False
    code: str = ""
    files: dict[str, str] = field(default_factory=dict)
    check_owners: bool = True

    @property
    def folder(self) -> Path:
        """The stage's folder."""
        return Path(self.run) / self.stage

    @property
    def later_links(self) -> bool:
        """Whether another job of the chain waits to continue the same stage."""
        return self.link < self.links

    @property
    def survives_nodes(self) -> bool:
        """Whether the stage can continue in its job without a node that failed."""
        return bool(self.spare_nodes) or len(self.node_counts) > 1

    def on(self, there: int) -> Self | None:
        """The stage on as many of `there` nodes as it can use; None: they are too few."""
        return next((replace(self, nodes=count, ranks=self.ranks and count * self.tasks_per_node)
                     for count in self.node_counts or (self.nodes,) if count <= there), None)

    def save(self, path: Path) -> None:
        """Write the file. Of a planned job, only the fields of this class."""
        write_json(path, {field.name: getattr(self, field.name) for field in fields(JobSpec)})

    @classmethod
    def load(cls, path: Path) -> JobSpec:
        """Read what `save` wrote; UserError if it is missing or damaged."""
        spec = read_record(path, cls, "Submit the same command again.")
        if spec is None:
            raise UserError(f"{path}, the job's spec, is missing. Submit the same command again.")
        return spec
