"""An export from its plan to its manifest."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.contract.run import Run
from pipeline.files import sha256_file
from tools.export_tokens import huggingface, megatron
from tools.export_tokens.draft import Draft, by_file, verified
from tools.export_tokens.plan import Plan, Region, plan_of
from tools.processes import in_order


def export(run: Run, options: argparse.Namespace, processes: int) -> None:
    """Make the folder `--out`.

    Raises:
        UserError: the run has no such tokens, a shard is not what was committed, or something else is at `--out`.
    """
    plan = plan_of(run, options.format, options.split, options.source, options.without_bos)
    draft = Draft(options.out, plan.identity)
    if draft.complete:
        print(f"{options.out} is there already, of these very tokens")
        return
    try:
        files = _written(draft, plan, processes)
        draft.publish(_manifest(run, plan, files))
    finally:
        draft.close()
    total = {name: sum(own[name] for own in plan.sources.values()) for name in ("docs", "tokens")}
    print(f"{options.out}: {total['docs']:,} documents, {total['tokens']:,} tokens in {len(files)} files")


def _written(draft: Draft, plan: Plan, processes: int) -> list[dict[str, Any]]:
    """Write what is not written yet, read all of it back: path, bytes and sha256 of each file."""
    is_megatron = plan.identity["format"] == "megatron"
    if draft.fresh:
        if is_megatron:
            megatron.lay_out(draft.folder, plan)
        draft.forget()
        draft.begun()
    done = draft.done()
    if done:
        print(f"going on: {len(done):,} of {len(plan):,} shards are written")
    missing = (part for part in plan.parts() if part.number not in done)
    numbers = (number for number in range(len(plan)) if number not in done)
    jobs: Any
    if is_megatron:
        jobs = ((draft.folder, part, plan.sources[part.source]["docs"]) for part in missing)
        results = in_order(megatron.write_part, jobs, processes)
    else:
        schema = huggingface.features(plan.dtype).arrow_schema
        jobs = ((draft.folder, part, len(plan), schema) for part in missing)
        results = in_order(huggingface.write_part, jobs, processes)
    for number, regions in zip(list(numbers), results, strict=True):
        draft.add(number, regions)
        done[number] = regions
    regions_of = by_file([*([megatron.headers(plan)] if is_megatron else []), *done.values()])
    if is_megatron:
        regions_of |= {f"{name}.bin": [] for name in plan.sources if f"{name}.bin" not in regions_of}
    files = list(in_order(partial(_verified, draft.folder), sorted(regions_of.items()), processes))
    if not is_megatron:
        files += [_record(draft.folder, name) for name in huggingface.finish(draft.folder, plan)]
    return files


def _verified(folder: Path, file: tuple[str, list[Region]]) -> dict[str, Any]:
    return verified(folder, *file)


def _record(folder: Path, name: str) -> dict[str, Any]:
    return {"path": name, "bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}


def _manifest(run: Run, plan: Plan, files: list[dict[str, Any]]) -> dict[str, Any]:
    """What `export.json` says, the identity apart."""
    facts = megatron.facts(plan) if plan.identity["format"] == "megatron" else {
        "layout": "datasets.load_from_disk; columns input_ids, key, source, bytes", "dtype": plan.dtype}
    return {"run": run.config.name, **facts, "bos": not plan.without_bos, "eos": True,
            "bos_id": plan.vocabulary["bos_id"], "eos_id": plan.vocabulary["eos_id"],
            "vocab_size": plan.vocabulary["size"], "sources": plan.sources,
            "total": {name: sum(own[name] for own in plan.sources.values())
                      for name in ("docs", "tokens", "text_bytes", "shards")}, "files": files}
