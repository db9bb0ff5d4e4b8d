"""Goodput: the share of time that went into productive steps, and where the rest went."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from drover.pipeline.core.console import duration
from drover.pipeline.records.goodput import CAUSES
from drover.pipeline.reporting.document import ALL, Bars, Block, Table
from drover.pipeline.reporting.facts import Facts

PRODUCTIVE = "productive steps"
MEANINGS = {**CAUSES, PRODUCTIVE: "steps of the finished model, each counted once",
            ALL: "from the first start of training to its end"}
SHOWN_STARTS = 50
"""Rows of the table of starts."""


def goodput(facts: Facts) -> Iterator[Block]:
    """The chapter; empty if the records of training do not suffice."""
    if (found := facts.goodput) is None or found.wall_s <= 0:
        return
    yield (f"{duration(found.wall_s)} passed from the first start of training to its end; {found.share:.1%} of this "
           f"time went into productive steps.")
    yield from found.notes
    parts = {PRODUCTIVE: found.effective_s, **{cause: seconds for cause, seconds in found.lost.items() if seconds}}
    yield Bars("Time by use", "seconds", parts, PRODUCTIVE, "s")
    yield Table("Time since the first start", {
        "use": "{use}", "seconds": "{seconds:,.1f}", "share": "{seconds / all:.1%}", "meaning": "{meaning}"},
        [{"use": name, "seconds": seconds, "all": found.wall_s, "meaning": MEANINGS[name]}
         for name, seconds in {**parts, ALL: found.wall_s}.items()])
    more = len(found.starts) - SHOWN_STARTS
    yield Table("Starts of training", {
        "began (UTC)": "{time}", "ended": "{why}", "ranks": "{ranks:,}", "from step": "{first:,}",
        "to step": "{last:,}", "startup": "{startup:s}", "lasted": "{lasted:s}"}, [
        {**vars(start), "time": datetime.fromtimestamp(start.began, UTC).strftime("%Y-%m-%d %H:%M:%S"),
         "startup": start.ready - start.began, "lasted": max(0.0, start.end - start.began)}
        for start in found.starts[:SHOWN_STARTS] if len(found.starts) > 1],
        f"The first {SHOWN_STARTS}; {more:,} more are in train/events.jsonl." if more > 0 else "")
