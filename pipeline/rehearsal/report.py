"""The results of a rehearsal, for programs and for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from drover.model.config import ModelConfig
from drover.pipeline.config.phases import BatchPlan, with_largest
from drover.pipeline.config.training import ParallelConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import readable, table
from drover.pipeline.parallel.stages import bubble, stage_layers
from drover.pipeline.rehearsal.memory import KINDS, Peak

if TYPE_CHECKING:
    from rich.console import RenderableType

    from drover.pipeline.rehearsal.watch import Collective, Traffic


@dataclass
class Rehearsal:
    """One step of one rank.

    Attributes:
        waits: places where the host waits for the device, and how often in the rehearsed part. The step's result is not
            read: training reads it in the next step.
        notes: differences between the rehearsal and the real run.
    """

    rank: int
    ranks: int
    layers: str
    peak: Peak
    traffic: Traffic
    waits: dict[str, int]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """As JSON, for programs."""
        channels = [{**asdict(channel), "calls": self.traffic.calls[channel], "bytes": self.traffic.bytes[channel]}
                    for channel in sorted(self.traffic.calls)]
        return {"rank": self.rank, "ranks": self.ranks, "layers": self.layers, "peak_bytes": self.peak.bytes,
                "kinds": self.peak.kinds, "largest": [asdict(item) for item in self.peak.items[:10]],
                "collectives": channels, "host_waits": self.waits, "notes": self.notes}


def layers_of(shape: ModelConfig, parallel: ParallelConfig, pipeline_rank: int) -> str:
    """The layers of a rank, as ranges."""
    held = stage_layers(shape, parallel.stages)
    return ", ".join(f"{held[stage].start}-{held[stage].stop - 1}" for stage in parallel.stages_of(pipeline_rank))


def ends_and_middle(config: Config, ranks: int) -> list[int]:
    """The first of the ranks that share the first, a middle and the last stage of a pipeline. Without a pipeline, rank
    0: it holds the most, because uneven parts are larger on the first ranks."""
    each = ranks // config.parallel.pp
    return [place * each for place in sorted({0, config.parallel.pp // 2, config.parallel.pp - 1})]


def page_of(config: Config, rehearsals: Sequence[Rehearsal]) -> list[RenderableType]:
    """The results as a page for the terminal."""
    ranks, parallel = rehearsals[0].ranks, config.parallel
    plan, sizes = BatchPlan.of(with_largest(config, ranks).train, parallel, ranks), parallel.sizes(ranks)
    layout = " x ".join(f"{name} {size}" for name, size in zip(
        ("pp", "dp_replicate", "dp_shard", "cp", "tp"), sizes, strict=True) if size > 1) or "1"
    page: list[RenderableType] = [f"rehearsed  one step of {config.name} on {ranks:,} ranks = {layout}",
                                  f"batch      {plan}"]
    if parallel.pp > 1:
        lost = bubble(config.model, parallel, plan.accumulation)
        text = "little, if all kinds of passes take equally long" if lost is None else f"{lost:.0%} of the time used"
        page.append(f"pipeline   {parallel.pp_schedule}, {parallel.stages} stages; lost by waiting: {text}")
    equal_ranks = [f"rank {one.rank:,}" for one in rehearsals]
    page += ["", table([
        ["memory at its peak", *equal_ranks], ["layers", *(one.layers for one in rehearsals)],
        *([kind, *(readable(one.peak.kinds[kind]) for one in rehearsals)] for kind in KINDS),
        ["all", *(readable(one.peak.bytes) for one in rehearsals)]], equal_ranks)]
    largest = fullest(rehearsals)
    page += [f"largest on rank {largest.rank:,}: {'; '.join(map(str, largest.peak.items[:3]))}", ""]
    channels = sorted({channel for one in rehearsals for channel in one.traffic.calls})
    page += [table([["collectives of the step", "ranks", *equal_ranks],
                    *([f"{channel.group}: {channel.operation}", f"{channel.ranks:,}",
                       *(_counted(one, channel) for one in rehearsals)] for channel in channels)],
                   ["ranks", *equal_ranks])]
    page += ["each with calls and bytes: what a rank sends or receives, whichever is more", ""]
    waits = {place: calls for one in rehearsals for place, calls in one.waits.items()}
    shown = "; ".join(f"{place}: {calls}" for place, calls in waits.items())
    return [*page, f"waits      {shown or 'none: the host reads nothing but the result of the step before'}",
            *(f"note       {text}" for text in dict.fromkeys(note for one in rehearsals for note in one.notes)),
            "note       CUDA's context, NCCL's buffers, kernels' workspaces and fragmentation come on top"]


def _counted(one: Rehearsal, channel: Collective) -> str:
    calls = one.traffic.calls.get(channel, 0)
    return f"{calls:,} x, {readable(one.traffic.bytes[channel])}" if calls else "-"


def fullest(rehearsals: Sequence[Rehearsal]) -> Rehearsal:
    """The rank that holds the most."""
    return max(rehearsals, key=lambda one: one.peak.bytes)
