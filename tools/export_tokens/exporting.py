"""Export the token shards of one split."""

from __future__ import annotations

import argparse
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from drover.pipeline.contract.run import Run
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError, require
from drover.pipeline.core.files import Record
from drover.pipeline.data.shard_table import ShardTable
from drover.pipeline.data.token_shards import TokenShard
from drover.pipeline.tokenization.kinds import vocabulary_record
from drover.tools.draft import Draft
from drover.tools.export_tokens import huggingface, megatron
from drover.tools.export_tokens.part import Counts, Part, Region, region_of
from drover.tools.processes import in_order

MANIFEST = "export.json"
FORMS: dict[str, ModuleType] = {"megatron": megatron, "hf": huggingface}
"""By name: a module with `lay_out`, `write_part`, `finish` and `facts`."""


@dataclass(frozen=True)
class Plan:
    """What to export: the token shards of one split, in the order of training.

    Attributes:
        folder, table: of the stage encode.
        rows: of the table, by source.
        sources: counts of each source: documents, exported tokens, UTF-8 bytes of text, shards.
        dtype: of the stored ids.
        vocabulary: the tokenizer stage's record.
        made_of: the inputs that decide every byte of the export.
    """

    folder: Path
    table: ShardTable
    rows: dict[str, np.ndarray]
    sources: Counts
    dtype: str
    vocabulary: Record
    made_of: Record

    def parts(self, count: int) -> Iterator[Part]:
        """The parts of all sources, in order."""
        number, without_bos = 0, self.made_of["without_bos"]
        for name, rows in self.rows.items():
            before = {"docs": 0, "tokens": 0}
            for row in rows.tolist():
                record = self.table.record(row)
                own = {"docs": record["docs"], "tokens": record["tokens"] - record["docs"] * without_bos}
                yield Part(number, count, self.folder, TokenShard(self.folder / record["path"], record), before, own,
                           self.sources[name]["docs"], self.vocabulary["bos_id"] if without_bos else None)
                number, before = number + 1, {key: before[key] + own[key] for key in before}


def plan_of(run: Run, form: str, split: str, source: str | None, without_bos: bool) -> Plan:
    """The plan of an export. UserError if the run has no token shards of this source and split."""
    encode, folder = run.finished("encode"), run.stage_folder("encode")
    table, names = ShardTable.of(encode.outputs), [own.name for own in run.config.shard.sources]
    if source not in (None, *names):
        raise UserError(f"{run.folder} has no source {source}; it has {', '.join(names)}.")
    rows = {name: own for name in names if source in (None, name) and len(own := table.rows(split, name))}
    if not rows:
        raise UserError(f"{folder} has no token shards of the split {split}{f' of {source}' if source else ''}.")
    vocabulary, counts = vocabulary_record(run.stage_folder("tokenizer")), encode.counts["splits"][split]
    sources = {name: {"docs": counts[name]["docs"],
                      "tokens": counts[name]["tokens"] - counts[name]["docs"] * without_bos,
                      "text_bytes": counts[name]["text_bytes"], "shards": len(own)} for name, own in rows.items()}
    return Plan(folder, table, rows, sources, encode.counts["dtype"], vocabulary, {
        "format": form, "split": split, "sources": list(rows), "without_bos": without_bos, "encode": encode.digest,
        "tokenizer_sha256": vocabulary["sha256"]})


def export(run: Run, options: argparse.Namespace, processes: int) -> None:
    """Make the folder `--out`.

    Raises:
        UserError: the run has no such tokens, a shard has changed, or something else is at `--out`.
    """
    if options.format == "hf":
        require("--format hf", "datasets", "take --format megatron")
    plan = plan_of(run, options.format, options.split, options.source, options.without_bos)
    total = {key: sum(own[key] for own in plan.sources.values()) for key in ("docs", "tokens", "text_bytes", "shards")}
    form, count = FORMS[options.format], total["shards"]
    with Draft(options.out, MANIFEST, plan.made_of) as draft:
        if draft.complete:
            echo(f"{options.out} exists already, with these tokens")
            return
        if "layout" not in draft.done:
            draft.add("layout", form.lay_out(draft.folder, plan.sources, plan.dtype))
        elif len(draft.done) > 1:
            echo(f"continuing: {len(draft.done) - 1:,} of {count:,} shards are written")
        missing = [number for number in range(count) if str(number) not in draft.done]
        jobs = ((draft.folder, part) for part in plan.parts(count) if str(part.number) not in draft.done)
        for number, written in zip(missing, in_order(form.write_part, jobs, processes), strict=True):
            draft.add(str(number), written)
        regions = defaultdict[str, list[Region]](list)
        for region in (region for written in draft.done.values() for region in written):
            regions[region[0]].append(region)
        for name in form.finish(draft.folder, count, plan.dtype, plan.made_of):
            regions[name] = [region_of(draft.folder / name)]
        files = list(in_order(read_back, ((draft.folder, *item) for item in sorted(regions.items())), processes))
        draft.describe({"run": run.config.name, **form.facts(plan.sources, plan.dtype), "bos": not options.without_bos,
                        "eos": True, "bos_id": plan.vocabulary["bos_id"], "eos_id": plan.vocabulary["eos_id"],
                        "vocab_size": plan.vocabulary["size"], "sources": plan.sources, "total": total, "files": files})
        draft.publish()
    echo(f"{options.out}: {total['docs']:,} documents, {total['tokens']:,} tokens in {len(files)} files")


def read_back(job: tuple[Path, str, list[Region]]) -> Record:
    """Read a file of an export (folder, name, regions) back. Returns its path, bytes and sha256.

    Raises:
        UserError: its content is not what was written.
    """
    folder, name, regions = job
    whole, at = hashlib.sha256(), 0
    with open(folder / name, "rb") as file:
        for _, start, size, digest in sorted(regions, key=lambda region: (region[1], region[2])):
            own, left = hashlib.sha256(), size
            while left and (data := file.read(min(left, 1 << 20))):
                own.update(data)
                whole.update(data)
                left -= len(data)
            if start != at or left or own.hexdigest() != digest:
                raise UserError(f"{folder / name} has other content at byte {start} than was written there. Check the "
                                f"disk, delete {folder} and run the command again.")
            at += size
        if file.read(1):
            raise UserError(f"{folder / name} is longer than what was written. Delete {folder} and run the command "
                            f"again.")
    return {"path": name, "bytes": at, "sha256": whole.hexdigest()}
