"""What became of a document, in lines for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.data.text_shards import SPLITS


def lines_of(record: dict[str, Any], done: int, planned: int, ranks: int) -> Iterator[str]:
    """The lines of one document.

    Args:
        done, planned: steps of the run.
        ranks: data-parallel ranks that were asked about; of one no rank is named.
    """
    if record["split"] not in SPLITS:
        yield _gone(record)
        if "origin" in record:
            yield f"    from {record['origin']}"
        return
    own = f"  id {record['id']}" if "id" in record else ""
    yield (f"document {record['key']}  source {record['source']}  {record['shard']} document {record['document']}  "
           f"{record['tokens']:,} tokens, {record['bytes']:,} bytes{own}")
    yield f"    from {record['origin']}"
    if "found" in record:
        yield f"    ... {' '.join(record['found'].split())} ..."
    for copy in record.get("duplicates", ()):
        yield f"    {copy['source']} {copy['id']} was dropped as a {copy['kind'].replace('_', '-')} of it"
    yield f"    {_summary(record, done, planned)}"
    for one in record["readings"]:
        yield "    " + _reading(one, ranks)
    if "text" in record:
        yield "    | " + record["text"].replace("\n", "\n    | ")


def _gone(record: dict[str, Any]) -> str:
    if record["split"] == "rejected":
        place = "" if record["record"] is None else f", record {record['record']}"
        return f"{record['source']}/{record['file']}{place} could not be read, and no step sees it: {record['reason']}"
    if "kept_id" in record:
        key = f" (key {record['kept_key']}, see there)" if "kept_key" in record else ""
        return (f"{record['source']} {record['id']} was dropped as a {record['split'].replace('_', '-')} of "
                f"{record['kept_source']} {record['kept_id']}{key}; no step sees it")
    found = f"\n    ... {' '.join(record['found'].split())} ..." if "found" in record else ""
    return (f"{record['source']} {record['id']} was dropped by the filter {record['filter']} ({record['reason']}); no "
            f"step sees it{found}")


def _summary(record: dict[str, Any], done: int, planned: int) -> str:
    if record["split"] == "heldout":
        return "held out: no step trains on it"
    of = {what: sorted({one["step"] for one in record["readings"] if one["what"] == what})
          for what in ("trained", "skipped", "left out", "to come")}
    if not record["readings"]:
        return f"read in none of the {max(done, planned)} steps that are done or planned"
    epochs = list(dict.fromkeys(_epoch(one) for one in record["readings"] if one["what"] == "trained"))
    told = [f"trained on in {len(of['trained'])} of {done} steps"
            + (f" (epochs {', '.join(epochs)})" if epochs else "")]
    told += [f"skipped in {len(of['skipped'])}"] if of["skipped"] else []
    told += [f"left out of {len(of['left out'])}"] if of["left out"] else []
    told += [f"next in step {of['to come'][0]}"] if of["to come"] else []
    return "; ".join(told)


def _epoch(one: dict[str, Any]) -> str:
    """The epoch of a reading; a phase whose sequences fit no grain counts its own."""
    return str(one["epoch"]) + (f" of phase {one['anew_in_phase']}" if "anew_in_phase" in one else "")


def _reading(one: dict[str, Any], ranks: int) -> str:
    rank = f"  rank {one['rank']}" if ranks > 1 and one["rank"] is not None else ""
    what = {"trained": "", "skipped": f"  update skipped ({one.get('why')})", "to come": "  to come",
            "left out": f"  left out by the rollback of this step ({one.get('why')})"}[one["what"]]
    return (f"step {one['step']}{rank}  sample {one['sample']}  epoch {_epoch(one)}  "
            f"tokens {one['tokens'][0]}..{one['tokens'][1]}{what}")
