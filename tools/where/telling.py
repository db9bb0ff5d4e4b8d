"""Print how a document was used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drover.pipeline.data.text_shards import SPLITS


def lines_of(record: dict[str, Any], done: int, planned: int, ranks: int) -> Iterator[str]:
    """The lines of one document.

    Args:
        done, planned: steps of the run.
        ranks: number of data-parallel ranks; with one, no rank is printed.
    """
    found = [f"    ... {' '.join(record['found'].split())} ..."] if "found" in record else []
    origin = [f"    from {record['origin']}"] if "origin" in record else []
    if record["split"] not in SPLITS:
        yield from (_gone(record), *found, *origin)
        return
    own = f"  id {record['id']}" if "id" in record else ""
    yield (f"document {record['key']}  source {record['source']}  {record['shard']} document {record['document']}  "
           f"{record['tokens']:,} tokens, {record['bytes']:,} bytes{own}")
    yield from (*origin, *found)
    for copy in record.get("duplicates", ()):
        yield f"    {copy['source']} {copy['id']} was dropped as a {copy['kind'].replace('_', '-')} of it"
    yield f"    {_summary(record, done, planned)}"
    for one in record["readings"]:
        rank = f"  rank {one['rank']}" if ranks > 1 and one["rank"] is not None else ""
        what = {"trained": "", "skipped": f"  update skipped ({one.get('why')})", "to come": "  to come",
                "left out": f"  left out by the rollback of this step ({one.get('why')})"}[one["what"]]
        yield (f"    step {one['step']}{rank}  sample {one['sample']}  epoch {_epoch(one)}  "
               f"tokens {one['tokens'][0]}..{one['tokens'][1]}{what}")
    if "text" in record:
        yield "    | " + record["text"].replace("\n", "\n    | ")


def _gone(record: dict[str, Any]) -> str:
    what = f"{record['source']} {record.get('id')} was dropped"
    if record["split"] == "rejected":
        place = "" if record["record"] is None else f", record {record['record']}"
        return f"{record['source']}/{record['file']}{place} could not be read, and no step sees it: {record['reason']}"
    if "kept_id" in record:
        key = f" (key {record['kept_key']}, see there)" if "kept_key" in record else ""
        return (f"{what} as a {record['split'].replace('_', '-')} of {record['kept_source']} {record['kept_id']}{key}; "
                f"no step sees it")
    return f"{what} by the filter {record['filter']} ({record['reason']}); no step sees it"


def _summary(record: dict[str, Any], done: int, planned: int) -> str:
    if record["split"] == "heldout":
        return "validation text: no step trains on it"
    if not record["readings"]:
        return f"read in none of the {max(done, planned)} steps that are done or planned"
    of = {what: sorted({one["step"] for one in record["readings"] if one["what"] == what})
          for what in ("trained", "skipped", "left out", "to come")}
    epochs = ", ".join(dict.fromkeys(_epoch(one) for one in record["readings"] if one["what"] == "trained"))
    told = {f"trained on in {len(of['trained'])} of {done} steps{f' (epochs {epochs})' if epochs else ''}": True,
            f"skipped in {len(of['skipped'])}": of["skipped"], f"left out of {len(of['left out'])}": of["left out"],
            f"next in step {(of['to come'] or [0])[0]}": of["to come"]}
    return "; ".join(text for text, holds in told.items() if holds)


def _epoch(one: dict[str, Any]) -> str:
    """The epoch of a reading. A phase whose sequences do not divide a chunk counts its own epochs."""
    return str(one["epoch"]) + (f" of phase {one['own_phase']}" if "own_phase" in one else "")
