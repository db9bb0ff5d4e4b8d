"""Lines that occur in many documents: counted unit by unit, then added up in partitions of equal ranges of digests.

A unit writes runs of about ROWS lines, each sorted by digest, with the number of documents that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from drover.pipeline.config.shipped import name_of
from drover.pipeline.contract.workers import Task
from drover.pipeline.core.files import Record
from drover.pipeline.data.documents import DIGEST_BYTES, digest
from drover.pipeline.data.filters.base import Chain, Dropped
from drover.pipeline.data.filters.duplicate_lines import LINE, DuplicateLines
from drover.pipeline.data.planning.runs import STAGING, with_records, write_array
from drover.pipeline.data.reading import unit_documents

if TYPE_CHECKING:
    from drover.pipeline.contract.stage_work import Work

ROWS = 4_000_000
"""Lines of a unit or of a partition that are in memory at once."""
RUN = np.dtype([("line", LINE), ("documents", "<u4")])


def find_frequent_lines(work: Work, units: Sequence[Task]) -> dict[str, list[str]]:
    """The files of the lines that each filter of duplicate lines removes, by its name, in the stage's folder.

    units: of reading.
    """
    made = dict[str, list[str]]()
    for number, own in enumerate(work.config.shard.filters):
        if not isinstance(own, DuplicateLines):
            continue
        name = name_of(own)
        counting = [Task(unit.name, {**unit.payload, "filters": unit.payload["filters"][:number], "made": {**made},
                                     "for": name}) for unit in units
                    if own.sources is None or unit.payload["source"]["name"] in own.sources]
        runs = [output for record in work.run_pass(f"lines-{name}", counting, count_lines, "units")
                for output in record["outputs"]]
        parts = ceil(sum(output["bytes"] for output in runs) / RUN.itemsize / ROWS)
        adding = [Task(f"{part:06d}", {"runs": [output["path"] for output in runs], "part": part, "parts": parts,
                                       "for": name, "most": own.max_documents}) for part in range(parts)]
        added = work.run_pass(f"frequent-{name}", adding, frequent_lines, "partitions")
        made[name] = [record["outputs"][0]["path"] for record in added]
    return made


def count_lines(folder: Path, payload: Record) -> Record:
    """Write the runs of a unit. Returns the files as `outputs`.

    payload: of `stage_unit`, with the filters before that `for` which lines are counted.
    """
    chain = Chain(payload["filters"], folder, payload["made"])
    paths = list[Path]()
    held = bytearray()

    def write() -> None:
        rows = np.rec.fromarrays(np.unique(np.frombuffer(bytes(held), LINE), return_counts=True), RUN)
        name = f"lines/{payload['for']}/{payload['name']}-{len(paths):03d}.npy"
        paths.append(write_array(folder / STAGING / name, rows))
    for item in unit_documents(payload):
        if not isinstance(item, tuple) or not item[0].text.strip() or isinstance(left := chain(*item), Dropped):
            continue
        held += b"".join({digest(line.encode()) for line in map(str.strip, left[0].text.split("\n")) if line})
        if len(held) > ROWS * DIGEST_BYTES:
            write()
            held.clear()
    write()
    return dict(with_records(folder, paths))


def frequent_lines(folder: Path, payload: Record) -> Record:
    """Write the lines of a partition that occur in more than `most` documents, sorted. Returns the file as `outputs`.

    payload: `runs`, the files of all units; `part` of `parts`, the partition; `for`, the name of the filter.
    """
    edges = [np.bytes_((part * (2**64 - 1) // payload["parts"]).to_bytes(8, "big"))
             for part in (payload["part"], payload["part"] + 1)]
    rows = []
    for path in payload["runs"]:
        run = np.load(folder / path, mmap_mode="r")
        first, end = run["line"].searchsorted(edges)
        rows.append(np.array(run[first:end if payload["part"] + 1 < payload["parts"] else len(run)]))  # closes the file
    together = np.concatenate(rows)
    lines, which = np.unique(together["line"], return_inverse=True)
    counts = np.bincount(which, together["documents"], len(lines))
    path = folder / STAGING / f"frequent/{payload['for']}/{payload['part']:06d}.npy"
    return dict(with_records(folder, [write_array(path, lines[counts > payload["most"]])]))
