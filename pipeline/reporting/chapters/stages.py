"""The stages: how long they ran, and on which machines."""

from __future__ import annotations

from collections.abc import Iterator

from drover.pipeline.reporting.document import Bars, Block, Table, pairs
from drover.pipeline.reporting.facts import Facts


def stages(facts: Facts) -> Iterator[Block]:
    """The chapter."""
    rows = [{**vars(manifest), "run_s": facts.wall_s(name), "starts": 1 + len(facts.earlier.get(name, ())),
             "time": manifest.finished.replace("T", " ")[:19], "reused": facts.reused.get(name),
             "output": sum(record["bytes"] for record in manifest.outputs)}
            for name, manifest in facts.manifests.items()]
    yield Bars("Run time of each stage", "seconds", {row["stage"]: row["run_s"] for row in rows}, form="s")
    yield Table("Stages", {
        "stage": "{stage}", "run time": "{run_s:s}", "starts": "{starts:,}", "ranks": "{execution[world_size]:n}",
        "processes": "{execution[processes]:n}", "cores": "{execution[cores]:n}", "host": "{execution[host]}",
        "finished (UTC)": "{time}", "output": "{output:B}",
        **({"reused from the run": "{reused}"} if facts.reused else {})}, rows,
        "Run time: the sum over all recorded starts, without the time between them.")
    yield pairs("Machine that wrote this report", {**{name: f"{{{name}}}" for name in facts.machine}, **{
        f"accelerator of {name}": f"{{{name}[device_name]}}" for name in facts.manifests}},
        {**facts.machine, **{name: manifest.counts for name, manifest in facts.manifests.items()}})
