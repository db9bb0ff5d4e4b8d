"""What a stage of a million units costs before and after its units' own work: keys, looking for finished ones, records.

    python -m benchmarks.units_at_scale                 1,000,000 units of `shard`'s kind
    python -m benchmarks.units_at_scale --units 100000 --folder /scratch/me

Records and outputs are made up, written without fsync; they lie in the page cache, so nothing is said of disks.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from pipeline.contract.stopping import StopRequest
from pipeline.contract.units import Unit, UnitRecords, unit_keys
from pipeline.contract.workers import Workers
from pipeline.files import sha256_json

COMMITTED = 2000
"""Units that are done and committed one after another, to see what that costs."""


def made_up(count: int) -> tuple[dict[str, Any], list[Unit]]:
    """A stage's identity that names a file for each unit, and units with the payload of a reading one."""
    identity = {"config": {"shard": {"shard_mb": 256, "sources": [{"name": "web", "kind": "files"}]}}, "inputs": {},
                "files": {f"web/{number:07d}.jsonl.zst": f"{number:064x}" for number in range(count)}}
    source = {"kind": "files", "name": "web", "paths": ["/data/web/**/*.jsonl.zst"], "format": "auto",
              "separator": None, "text_field": "text", "id_field": None, "meta_fields": []}
    return identity, [Unit(f"web-{number:05d}", {"name": f"web-{number:05d}", "source": source, "pieces": [
        {"name": f"web/{number:07d}.jsonl.zst", "path": f"/data/web/{number:07d}.jsonl.zst", "bytes": 250_000_000,
         "mtime_ns": 1_700_000_000_000_000_000, "start": 0, "stop": 250_000_000}]}) for number in range(count)]


def record(number: int) -> dict[str, Any]:
    """What a unit leaves."""
    return {"documents": 80_000, "empty": 3, "rejected": 0, "lost": 0, "read": 80_003, "filters": {},
            "outputs": [{"path": f"staging/{number // 1000:05d}/{number:07d}", "bytes": 0, "sha256": f"{number:064x}"}],
            "inputs": [{"name": f"web/{number:07d}.jsonl.zst", "path": f"/data/web/{number:07d}.jsonl.zst",
                        "bytes": 250_000_000, "mtime_ns": 1_700_000_000_000_000_000, "whole": True, "start": 0,
                        "digests": [f"{number:064x}"]}]}


def leave(store: UnitRecords, units: list[Unit], keys: dict[str, str]) -> None:
    """The records and outputs of all units, as a stage that was killed leaves them."""
    for number, unit in enumerate(units):
        found, path = record(number), store.path(unit.name)
        output = store.stage_folder / found["outputs"][0]["path"]
        for place in (path, output):
            if number % 1000 == 0:
                place.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"key": keys[unit.name], **found}))
        output.touch()


def nothing(folder: Path, payload: Any) -> dict[str, Any]:
    """A unit without work."""
    return {"outputs": []}


def timed(what: str, call: Callable[[], Any]) -> Any:
    """Call it, and say how long it took and how much memory the process has had at most."""
    began = time.monotonic()
    result = call()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{what:<52} {time.monotonic() - began:8.1f} s   peak {peak:5.2f} GB", flush=True)
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the records go for the time (default: the temporary folder)")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    identity, units = timed(f"{options.units:,} units made up", lambda: made_up(options.units))
    with closing(Workers(options.processes)) as workers, tempfile.TemporaryDirectory(dir=options.folder) as place:
        store = UnitRecords(Path(place), "read", print)
        keys = timed("their keys", lambda: unit_keys(identity, "read", units))
        few = units[:20]
        timed("20 keys as they were before: the identity in each", lambda: [
            sha256_json([identity, "read", unit.payload]) for unit in few])
        found = timed("a fresh start: nothing is found", lambda: store.found(keys))
        assert not found
        timed(f"{COMMITTED:,} units without work done and committed", lambda: [
            store.write(name, keys[name], done) for name, done in workers.do(
                nothing, Path(place), units[:COMMITTED], StopRequest())])
        timed("all units' records left, as by a kill", lambda: leave(store, units, keys))
        share = {unit.name: keys[unit.name] for unit in units[::64]}
        timed("one of 64 array elements resumes", lambda: store.found(share))
        found = timed("the whole resumes: each record read, outputs there", lambda: store.found(keys))
        assert len(found) == len(units)
        timed("their records gathered in one file", lambda: store.gather(keys, found))
        print(f"which has {store.whole.stat().st_size / 1e6:,.0f} MB")
        del found
        found = timed("the next phase takes them from it", lambda: store.found(keys, outputs=False))
        assert len(found) == len(units)
        del found
        found = timed("the whole resumes from it: outputs there", lambda: store.found(keys))
        assert len(found) == len(units)


if __name__ == "__main__":
    sys.exit(main())
