"""Provenance: from the result back to its inputs, by digests, versions, commits and settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

from drover.pipeline.config.loading import dump_config
from drover.pipeline.core.files import Record
from drover.pipeline.reporting.document import Block, Fold, Table, pairs
from drover.pipeline.reporting.facts import Facts, shareable

SHOWN_FILES = 200
"""Input files of a stage that are listed."""


def provenance(facts: Facts) -> Iterator[Block]:
    """The chapter."""
    lineage, inputs = [], []
    versions: dict[str, dict[str, list[str]]] = {}
    folds = {"Configuration, with all defaults and without folders": shareable(dump_config(facts.config))}
    for stage, manifest in facts.manifests.items():
        made_of = [f"{need} {digest[:8]}" for need, digest in manifest.fingerprint.get("inputs", {}).items()]
        commit = str(manifest.git.get("commit") or "")[:10] + " + changes" * bool(manifest.git.get("changed"))
        lineage.append({"stage": stage, "digest": manifest.digest[:16], "outputs": len(manifest.outputs),
                        "commit": commit or None,
                        "made of": ", ".join(made_of) or f"input files: {len(manifest.files):,}"})
        groups: dict[str, list[Record]] = {}
        for record in manifest.files:
            groups.setdefault(record["name"].partition("/")[0], []).append(record)
        inputs += [{"stage": stage, "source": source, "files": len(records),
                    "bytes": sum(record["bytes"] for record in records),
                    "folder": shareable(os.path.commonpath([record["path"] for record in records]))}
                   for source, records in groups.items()]
        listed = [f"{record['sha256'][:16]}  {record['name']}" for record in manifest.files]
        left_out = [f"... and {len(listed) - SHOWN_FILES:,} more"] if len(listed) > SHOWN_FILES else []
        folds[f"Input files of {stage} ({len(listed):,})"] = "\n".join([*listed[:SHOWN_FILES], *left_out])
        for package, version in manifest.software.items():
            versions.setdefault(package, {}).setdefault(version, []).append(stage)
    yield ("Each stage's digest is a hash of the paths and contents of its outputs. Its inputs are the digests of the "
           "stages whose outputs it read.")
    yield Table("Lineage", {"stage": "{stage}", "digest of its outputs": "{digest}", "inputs": "{made of}",
                            "commit": "{commit}", "files": "{outputs:,}"}, lineage)
    yield Table("Input files", {"stage": "{stage}", "source": "{source}", "files": "{files:,}", "size": "{bytes:B}",
                                "folder": "{folder}"}, inputs,
                "As recorded by the stages, even if the configuration names other files now.")
    yield pairs("Where the results are", {
        "newest checkpoint": "train/{checkpoint}", "Hugging Face model": "convert/hf",
        "metrics of each step": "train/metrics.jsonl", "evaluation": "evaluate/results.json",
        "TensorBoard": "tensorboard" if any(sink.kind == "tensorboard" for sink in facts.config.train.log_to) else ""},
        facts.counts("train"),
        "Paths within the run's folder, or within the reused run's folder.")
    yield Table("Software", {"package": "{package}", "version": "{versions}"}, [
        {"package": package, "versions": "; ".join(
            version if len(found) == 1 else f"{version} ({', '.join(stages)})" for version, stages in found.items())}
        for package, found in versions.items()])
    folds["Definitions of the metrics"] = "\n".join(
        f"{name}: {meaning}" for name, meaning in facts.results.get("definitions", {}).items())
    yield from (Fold(title, text) for title, text in folds.items())
