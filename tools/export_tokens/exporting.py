"""An export from the token shards of one split to its manifest."""

from __future__ import annotations

import argparse
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.contract.run import Run
from pipeline.data.shard_table import ShardTable
from pipeline.data.token_shards import TokenShard
from pipeline.errors import UserError
from pipeline.tokenization.kinds import vocabulary_record
from tools.draft import Draft
from tools.export_tokens import huggingface, megatron
from tools.export_tokens.part import Part, Region, region_of
from tools.processes import in_order

MANIFEST = "export.json"
FORMS: dict[str, ModuleType] = {"megatron": megatron, "hf": huggingface}
"""By name: a module with `lay_out`, `write_part`, `finish` and `facts`."""


def export(run: Run, options: argparse.Namespace, processes: int) -> None:
    """Make the folder `--out`.

    Raises:
        UserError: the run has no such tokens, a shard is not what was committed, or something else is at `--out`.
    """
    encode, folder = run.finished("encode"), run.stage_folder("encode")
    table, names = ShardTable.of(encode.outputs), [own.name for own in run.config.shard.sources]
    if options.source not in (None, *names):
        raise UserError(f"{run.folder} has no source {options.source}; it has {', '.join(names)}.")
    rows = {name: own for name in names if options.source in (None, name)
            and len(own := table.rows(options.split, name))}
    if not rows:
        raise UserError(f"{folder} has no token shards of the split {options.split}"
                        f"{f' of {options.source}' if options.source else ''}.")
    vocabulary, counts = vocabulary_record(run.stage_folder("tokenizer")), encode.counts["splits"][options.split]
    without_bos = bool(options.without_bos)
    sources = {name: {"docs": counts[name]["docs"],
                      "tokens": counts[name]["tokens"] - counts[name]["docs"] * without_bos,
                      "text_bytes": counts[name]["text_bytes"], "shards": len(own)} for name, own in rows.items()}
    made_of = {"format": options.format, "split": options.split, "sources": list(rows), "without_bos": without_bos,
               "encode": encode.digest, "tokenizer_sha256": vocabulary["sha256"]}

    def parts() -> Iterator[Part]:
        number = 0
        for name, own in rows.items():
            before = dict.fromkeys(("docs", "tokens"), 0)
            for row in own.tolist():
                record = table.record(row)
                given = {"docs": record["docs"], "tokens": record["tokens"] - record["docs"] * without_bos}
                yield Part(number, count, folder, TokenShard(folder / record["path"], record), dict(before), given,
                           sources[name]["docs"], vocabulary["bos_id"] if without_bos else None)
                number, before = number + 1, {key: before[key] + given[key] for key in before}

    form, count, dtype = FORMS[options.format], sum(map(len, rows.values())), str(encode.counts["dtype"])
    with Draft(options.out, MANIFEST, made_of) as draft:
        if draft.complete:
            print(f"{options.out} is there already, of these very tokens")
            return
        if "layout" not in draft.done:
            draft.add("layout", form.lay_out(draft.folder, sources, dtype))
        elif len(draft.done) > 1:
            print(f"continuing: {len(draft.done) - 1:,} of {count:,} shards are written")
        shared = form.shared(dtype)
        missing = [str(number) for number in range(count) if str(number) not in draft.done]
        jobs = ((draft.folder, part, shared) for part in parts() if str(part.number) not in draft.done)
        for name, written in zip(missing, in_order(form.write_part, jobs, processes), strict=True):
            draft.add(name, written)
        regions = defaultdict[str, list[Region]](list)
        for region in (region for written in draft.done.values() for region in written):
            regions[region[0]].append(region)
        for name in form.finish(draft.folder, count, dtype, made_of):
            regions[name] = [region_of(draft.folder / name)]
        files = list(in_order(read_back, ((draft.folder, *item) for item in sorted(regions.items())), processes))
        total = {key: sum(own[key] for own in sources.values()) for key in ("docs", "tokens", "text_bytes", "shards")}
        draft.describe({"run": run.config.name, **form.facts(sources, dtype), "bos": not without_bos, "eos": True,
                        "bos_id": vocabulary["bos_id"], "eos_id": vocabulary["eos_id"],
                        "vocab_size": vocabulary["size"], "sources": sources, "total": total, "files": files})
        draft.publish()
    print(f"{options.out}: {total['docs']:,} documents, {total['tokens']:,} tokens in {len(files)} files")


def read_back(job: tuple[Path, str, list[Region]]) -> dict[str, Any]:
    """Read a whole file of an export (folder, name, regions): its path, bytes and sha256.

    Raises:
        UserError: it does not hold, end to end, what was written.
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
                raise UserError(f"{folder / name} does not hold at byte {start} what was written there. Check the "
                                f"disk, delete {folder} and run the command again.")
            at += size
        if file.read(1):
            raise UserError(f"{folder / name} is longer than what was written. Delete {folder} and run the command "
                            f"again.")
    return {"path": name, "bytes": at, "sha256": whole.hexdigest()}
