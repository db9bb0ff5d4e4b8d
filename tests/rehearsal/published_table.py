"""The table of docs/memory.md: what a rank of the shipped configurations holds and exchanges.

    python -m tests.rehearsal.published_table     all of its rows (minutes), to be put into the page
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from drover.pipeline.config.checks import network
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.phases import BatchPlan, with_largest
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import markdown
from drover.pipeline.parallel.stages import bubble
from drover.pipeline.rehearsal.fitting import rehearse_apart
from drover.pipeline.rehearsal.memory import KINDS
from drover.pipeline.rehearsal.report import ends_and_middle, fullest

LONG = ("train.sequence_length=131072", "model.context_length=131072", "parallel.cp=16")
PUBLISHED: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("configs/llama_110m.yaml", 1, ()), ("configs/llama_350m.yaml", 1, ()), ("configs/llama_350m.yaml", 8, ()),
    ("configs/llama3.2_1b.yaml", 8, ()), ("configs/llama3_8b.yaml", 8, ()), ("configs/llama3_8b.yaml", 64, ()),
    ("configs/llama3_8b_128k.yaml", 8, ()), ("configs/llama3_70b.yaml", 1024, ()),
    ("configs/llama3_405b.yaml", 16384, ()), ("configs/llama3_405b.yaml", 16384, LONG))
"""The rows: a file, so many ranks, settings."""


def gigabytes(size: int) -> str:
    """Bytes in GB, for tables."""
    return f"{size / 1e9:,.2f}" if 0 < size < 1e10 else f"{size / 1e9:,.1f}" if size else "0"


def row(config: Config, ranks: int) -> Sequence[str]:
    """A layout's line in the table: of the rank that holds the most among those rehearsed."""
    most = fullest(rehearse_apart(config, ranks, ends_and_middle(config, ranks)))
    kinds, traffic, sums = most.peak.kinds, most.traffic, Counter[str]()
    for channel, size in traffic.bytes.items():
        sums[channel.group] += size
    train = with_largest(config, ranks).train
    waiting = bubble(network(config), config.parallel, BatchPlan.of(train, config.parallel, ranks).accumulation)
    return (f"`{config.name}`, {ranks:,}", f"{train.sequence_length:,}", f"{most.rank:,}",
            gigabytes(most.peak.bytes), *(gigabytes(kinds[kind]) for kind in kinds),
            "; ".join(f"{group} {gigabytes(size)}" for group, size in sorted(sums.items()) if size >= 1e7),
            f"{sum(traffic.calls.values()):,}", "?" if waiting is None else f"{waiting:.0%}")


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The table in Markdown, with its heading."""
    return markdown([("configuration, ranks", "tokens", "fullest rank", "peak, GB", *KINDS,
                      "collectives of a step by group, GB", "calls", "bubble"), *rows])


if __name__ == "__main__":
    print("\n".join(table([row(load_config(path, settings), ranks) for path, ranks, settings in PUBLISHED])))
