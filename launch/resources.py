"""What a stage asks of Slurm: its own wishes over those for all stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.launching import LaunchConfig, minutes


@dataclass(frozen=True)
class Asked:
    """Resources of a stage's jobs. None: the site's default. `cpus`: per rank, or per job where there are no ranks."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    mem: str | None = None
    cpus: int = 1
    gpus_per_node: int = 0
    minutes: int = 0
    extra: dict[str, str | int | bool] = field(default_factory=dict)
    at_once: int | None = None


def asked_of(launch: LaunchConfig, stage: str) -> Asked:
    """The resources of one stage."""
    own = launch.of(stage)
    wish = {name: getattr(launch, name) if (value := getattr(own, name, None)) is None else value for name in (
        "partition", "account", "qos", "constraint", "exclude", "mem", "cpus", "time", "gpus_per_node")}
    return Asked(minutes=minutes(wish.pop("time")), extra={**launch.extra, **(own.extra or {})},
                 at_once=getattr(own, "at_once", None), **wish)
