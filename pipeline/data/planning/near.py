"""Documents that share a band of their signatures, as edges between documents.

A document that has an equal one before it in its group takes no part, since it is like that one; and of the documents
of a group that share a band only the first goes into the group's run. So 10^8 near-copies of a page are a row a group
and band, and as many edges as documents, never pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np

from pipeline.data.planning.runs import (
    Layout,
    equals_path,
    first_of_equals,
    group_name,
    partition_offsets,
    read_partition,
)
from pipeline.data.planning.signatures import NONE
from pipeline.data.reading import STAGING, staged
from pipeline.files import atomic_file, output_record

BAND = np.dtype([("key", "<u8"), ("place", "<u4")])
"""The number of a band, and the place in the group of the first document that has it."""
EDGE = np.dtype([("first", "<u8"), ("other", "<u8")])
"""Two documents that share a band: the first of those that do, and another."""


def bands_path(folder: Path, group: int) -> Path:
    """The group's run of bands: rows of BAND, parted by band and then like digests."""
    return folder / STAGING / "runs" / f"{group_name(group)}.bands"


def edges_path(folder: Path, name: str) -> Path:
    """Rows of EDGE found by the unit of that name."""
    return folder / STAGING / "edges" / f"{name}.edges"


def sort_bands(folder: Path, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Write the run of bands of a group whose run is written, and the edges inside of the group. Their records."""
    group, backwards = payload["group"], payload["keep"] == "last"
    tables = [np.load(staged(folder, unit, ".bands"), mmap_mode="r") for unit in payload["units"]]
    one = np.ones(sum(payload["documents"]), bool)
    one[np.load(equals_path(folder, group))["place"]] = False
    places = np.flatnonzero(one).astype(np.uint32)
    offsets = [np.zeros(1, np.uint64)]
    edges, bands = edges_path(folder, group_name(group)), bands_path(folder, group)
    with atomic_file(edges) as out, atomic_file(bands) as run:
        run.write(bytes(8 * (payload["bands"] * payload["partitions"] + 1)))
        for band in range(payload["bands"]):
            keys = np.concatenate([table[:, band] for table in tables])[places]
            numbers = places[keys != NONE] + np.uint64(payload["start"])
            rows = _first_of_each(keys[keys != NONE], numbers, backwards, out)
            rows["number"] -= np.uint64(payload["start"])
            rows.astype(BAND).tofile(run)
            offsets.append(partition_offsets(rows["key"], payload["partitions"])[1:] + offsets[-1][-1])
        run.seek(0)
        run.write(np.concatenate(offsets).astype("<u8").tobytes())
    return [output_record(folder, path) for path in (bands, edges)]


def _first_of_each(keys: np.ndarray, numbers: np.ndarray, backwards: bool, out: IO[bytes]) -> np.ndarray:
    """The first document (key, number) of each key, by key; writes the edges to the others. numbers ascend."""
    order = len(keys) - 1 - np.argsort(keys[::-1], kind="stable") if backwards else np.argsort(keys, kind="stable")
    keys, numbers = keys[order], numbers[order]
    new = first_of_equals(keys)
    firsts, others = np.flatnonzero(new), np.flatnonzero(~new)
    edges = np.empty(len(others), EDGE)
    edges["first"], edges["other"] = numbers[firsts[np.cumsum(new)[others] - 1]], numbers[others]
    edges.tofile(out)
    rows = np.empty(len(firsts), [("key", "<u8"), ("number", "<u8")])
    rows["key"], rows["number"] = keys[firsts], numbers[firsts]
    return rows


def band_name(band: int, partition: int) -> str:
    """Name of the unit of a band's partition."""
    return f"band-{band:03d}-partition-{partition:06d}"


def band_payload(layout: Layout, bands: int, band: int, partition: int, runs: str) -> dict[str, Any]:
    """What `match_band` needs; runs: a hash of all runs."""
    return {"band": band, "bands": bands, "partition": partition, "partitions": layout.partitions,
            "starts": layout.group_starts, "keep": layout.keep, "runs": runs}


def match_band(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Write the edges between groups of one partition of one band. Returns the file as `outputs`."""
    starts, partitions = payload["starts"], payload["partitions"]
    parts = [read_partition(bands_path(folder, group), BAND, payload["band"] * partitions + payload["partition"],
                            payload["bands"] * partitions) for group in range(len(starts) - 1)]
    keys = np.concatenate([part["key"] for part in parts])
    numbers = np.concatenate([part["place"] + np.uint64(start) for part, start in
                              zip(parts, starts, strict=False)])
    path = edges_path(folder, band_name(payload["band"], payload["partition"]))
    with atomic_file(path) as out:
        _first_of_each(keys, numbers, payload["keep"] == "last", out)
    return {"outputs": [output_record(folder, path)]}
