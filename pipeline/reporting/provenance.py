"""Chapters on where everything came from: tokenizer, time, machines, software, inputs and settings."""

from __future__ import annotations

import json
import os
from typing import Any

from drover.pipeline.console import duration
from drover.pipeline.reporting.document import Figure, Fold, Section, Table, count_tables, percent, shown, size
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.reporting.plots import bar_chart

TOKENIZER_COLUMNS = (("bytes_per_token", "bytes per token"), ("characters_per_token", "characters per token"),
                     ("tokens_per_word", "tokens per word"), ("fallback_share", "spelled in bytes"),
                     ("unknown_share", "unknown"), ("round_trip_failures", "not read back"),
                     ("documents", "documents"), ("text_bytes", "bytes"))


def tokenizer_section(facts: Facts) -> Section:
    """What the tokenizer does to the text."""
    section, report = Section("tokenizer", "Vocabulary"), facts.tokenizer
    if report.get("sources"):
        section.words.append(
            f"{report.get('kind')}, {shown(report.get('size'))} ids, of which {shown(report.get('used'))} mean "
            f"something: {shown(report.get('pieces'))} pieces and {shown(report.get('special_ids'))} special ids. "
            f"{shown(report.get('unused_pieces'))} pieces occurred neither in held-out text nor in a sample of the "
            f"training text.")
        if marks := report.get("marks_as_spaces"):
            section.words.append(
                f"{shown(marks)} document{'s have' if marks > 1 else ' has'} the character U+2581 (\u2581), "
                f"sentencepiece's own sign for a space: there it is read back, and written by the model, as a space.")
        entries = [*report["sources"].items()]
        entries += [("all held-out text", report["total"])] if len(entries) > 1 and report.get("total") else []
        entries += [("sample of training text", report["training_sample"])] if report.get("training_sample") else []
        rows = [[name, *(_tokenizer_cell(key, entry.get(key)) for key, _ in TOKENIZER_COLUMNS)]
                for name, entry in entries]
        columns = ["source", *(title for _, title in TOKENIZER_COLUMNS)]
        section.tables.append(Table("What it does to text", columns, rows))
        if report.get("longest_pieces"):
            section.folds.append(Fold("Longest pieces", "\n".join(map(repr, report["longest_pieces"]))))
    shown_above = ("kind", "vocab_size", "used", "unused_pieces", "heldout") if report else ()
    section.tables += count_tables("In numbers", facts.manifests["tokenizer"].counts, leave_out=shown_above)
    return section


def _tokenizer_cell(key: str, value: Any) -> str:
    if key.endswith("_share") and value is not None:
        return percent(value, 3)
    return f"{value:.3f}" if isinstance(value, float) else shown(value)


def export_section(facts: Facts) -> Section:
    """What the exported model was compared with before it counted."""
    section, counts = Section("export", "Exported model"), facts.manifests["convert"].counts
    if "transformers_logit_error" not in counts:
        return section
    section.words.append(
        f"{shown(counts.get('tensors_compared'))} tensors read back as the checkpoint's, bit for bit. On "
        f"{shown(counts['tokens_compared'])} held-out tokens what transformers computes of the export, and what the "
        f"training model computes, were each compared with a float64 forward pass of the checkpoint "
        f"({shown(counts['layers_compared'])} of {shown(facts.config.model.layers)} layers). Logits reach "
        f"{shown(counts['largest_logit'])}, the mean token loss is {shown(counts['token_loss'])} nats. The likeliest "
        f"next token was the same on {shown(counts['argmax_equal'])} tokens; on "
        f"{shown(counts['tokens_compared'] - counts['argmax_decided'])} rounding may decide it.")
    sides = (("transformers, of the export", "transformers"), ("training model", "training"),
             ("single precision itself", "single_precision"))
    section.tables.append(Table(
        "Largest difference from float64", ["float32 arithmetic of", "logits", "token losses (nats)"],
        [[title, shown(counts[f"{key}_logit_error"]), shown(counts[f"{key}_loss_error"])] for title, key in sides],
        note=f"Either side may be off by {counts['factor']:g} times what single precision itself is."))
    return section


def time_section(facts: Facts) -> Section:
    """Wall time, processes and machine of each stage."""
    section = Section("time", "Time and machines")
    rows, bars = [], []
    for name, manifest in facts.manifests.items():
        execution = manifest.execution
        ranks = execution.get("world_size", 1)
        rows.append([name, duration(manifest.wall_s), f"{ranks} rank{'s' if ranks > 1 else ''}" if ranks > 1 else
                     f"{shown(execution.get('processes'))} proc.", shown(execution.get("cores")),
                     str(execution.get("host", "–")), manifest.finished.replace("T", " ").replace("+00:00", ""),
                     f"reused from {facts.reused[name]}" if name in facts.reused else
                     size(sum(record["bytes"] for record in manifest.outputs))])
        bars.append((name, manifest.wall_s, False))
    section.figures.append(Figure("Wall time of each stage", bar_chart(
        "wall", bars, "seconds", labels=[duration(value) for _, value, _ in bars])))
    section.tables.append(Table(
        "Stages", ["stage", "wall time", "processes", "cores", "host", "finished (UTC)", "output"], rows,
        note="Wall time of the last start of a stage; what a killed one did before is not in it."))
    devices = {name: manifest.counts["device_name"] for name, manifest in facts.manifests.items()
               if manifest.counts.get("device_name")}
    section.tables.append(Table("Machine that wrote this report", ["", ""], [*facts.machine.items(), *(
        (f"accelerator of {name}", device) for name, device in devices.items())]))
    return section


def provenance_section(facts: Facts) -> Section:
    """Digests that lead from the result back to the input, versions, commit, settings."""
    section = Section("provenance", "Provenance")
    section.words.append("Each stage's digest is a hash of the paths and contents of its outputs; its inputs are the "
                         "digests of the stages it was made of.")
    section.tables.append(Table("Lineage", ["stage", "digest of its outputs", "made of", "commit", "files"], [
        [name, manifest.digest[:16],
         ", ".join(f"{need} {digest[:8]}" for need, digest in manifest.fingerprint.get("inputs", {}).items())
         or f"{len(manifest.files)} input file{'' if len(manifest.files) == 1 else 's'}",
         _commit(manifest.git), shown(len(manifest.outputs))] for name, manifest in facts.manifests.items()], labels=4))
    if rows := _read_from_outside(facts):
        section.tables.append(Table("What was read", ["stage", "source", "files", "size", "in"], rows, labels=2,
                                    note="By the manifests of the stages that were used, whatever the configuration "
                                         "names; the hash of each file is below."))
    versions: dict[str, dict[str, list[str]]] = {}
    for name, manifest in facts.manifests.items():
        for package, version in manifest.software.items():
            versions.setdefault(package, {}).setdefault(version, []).append(name)
    section.tables.append(Table("Software", ["package", "version"], [
        [package, next(iter(found)) if len(found) == 1 else
         "; ".join(f"{version} ({', '.join(stages)})" for version, stages in found.items())]
        for package, found in versions.items()], labels=2))
    section.folds.append(Fold("Configuration (resolved)", facts.config_text))
    files = {name: [f"{record['sha256'][:16]}  {record['name']}" for record in manifest.files]
             for name, manifest in facts.manifests.items() if manifest.files}
    for name, lines in files.items():
        more = [f"... and {len(lines) - 200} more"] if len(lines) > 200 else []
        section.folds.append(Fold(f"Input files of {name} ({len(lines):,})", "\n".join(lines[:200] + more)))
    section.folds.append(Fold("Definitions of the figures", json.dumps(
        facts.results.get("definitions", {}), indent=1, ensure_ascii=False)))
    return section


def _read_from_outside(facts: Facts) -> list[list[str]]:
    """A row per stage and source: how many files were read, and in which folder they all were."""
    rows = []
    for stage, manifest in facts.manifests.items():
        groups: dict[str, list[dict[str, Any]]] = {}
        for record in manifest.files:
            groups.setdefault(record["name"].partition("/")[0], []).append(record)
        for source, records in groups.items():
            folder = os.path.commonpath([os.path.dirname(record["path"]) for record in records])  # noqa: PTH120 - text
            where = records[0]["path"] if len(records) == 1 else folder
            rows.append([stage, source, shown(len(records)), size(sum(record["bytes"] for record in records)), where])
    return rows


def _commit(git: dict[str, object]) -> str:
    return f"{str(git['commit'])[:10]}{' + changes' if git.get('changed') else ''}" if git.get("commit") else "–"
