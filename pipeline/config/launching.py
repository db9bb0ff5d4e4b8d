"""Settings of the machines that stages run on. None of them changes what is computed."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.section import Section


class LaunchConfig(Section):
    """Processes on one box, and what is asked of Slurm."""

    processes: int | None = Field(None, gt=0)
    """Processes on one box: ranks of train and evaluate (never more than GPUs, where there are any), workers of
    shard, tokenizer and encode. null: one rank per GPU (1 without), a worker per core."""
    nodes: int = Field(1, gt=0)
    """Slurm nodes for train."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs (and ranks) per Slurm node; 0: CPU ranks, `processes` of them per node. evaluate takes one such node."""
    cpus_per_task: int = Field(4, gt=0)
    """CPU cores per rank on Slurm, and of a stage without ranks (which gets more if `processes` is more)."""
    partition: str | None = None
    """Slurm partition; null: the site's default."""
    account: str | None = None
    """Slurm account; null: the user's default."""
    time_minutes: int = Field(240, gt=0)
    """Slurm time limit per job in minutes."""
    memory_gb: int | None = Field(None, gt=0)
    """Memory per Slurm node in GB; null: the site's default."""
    setup: list[str] = []
    """Shell lines that a Slurm job runs first (modules, virtual environment)."""
