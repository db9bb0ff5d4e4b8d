"""Figures that follow from measured ones, and the tables of tools.bench_gpu. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.files import write_text

Row = dict[str, Any]


def derived(row: Row, result: dict[str, Any]) -> Row:
    """`row` with rates and utilisation added, in place. MFU is None where the card's peak is not known."""
    if row["status"] == "ok" and "step_s" in row:
        middle = statistics.median(row["step_s"])
        row["tokens_per_s"] = row["tokens"] / middle
        datasheet, measured = result["machine"].get("datasheet_tflops"), matrix_peak(result)
        for count in ("causal", "full"):
            row[f"tflops_{count}"] = tflops = row["tokens_per_s"] * row[f"flops_{count}"] / 1e12
            row[f"mfu_{count}"] = tflops / datasheet if datasheet else None
            row[f"of_matrix_peak_{count}"] = tflops / measured if measured else None
        row["compile_s"] = max(0.0, row["first_step_s"] - middle)
    return row


def matrix_peak(result: dict[str, Any]) -> float | None:
    """TFLOP/s of the best bf16 product."""
    return max((row["tflops"] for row in result["rows"] if row["kind"] == "matrix" and row["status"] == "ok"
                and row.get("precision") == "bf16"), default=None)


def line(row: Row) -> str:
    """A row for the terminal."""
    name = f"{row['case']}{': ' if row['part'] else ''}{row['part']}"
    if row["status"] != "ok":
        return f"{name:<60} {row['status'].upper()}: {row.get('note', '')[:160]}"
    if "tokens_per_s" in row:
        text = (f"{row['tokens_per_s']:,.0f} tokens/s  {row['tflops_full']:.1f} TFLOP/s  "
                f"MFU {_percent(row['mfu_full'])} full {_percent(row['mfu_causal'])} causal  "
                f"{row['memory_gb']:.1f} GB  first step {row['first_step_s']:.1f} s")
    else:
        text = "  ".join(f"{key} {_plain(value)}" for key, value in row.items()
                         if key not in ("case", "kind", "part", "status") and not isinstance(value, (dict, list)))
    return f"{name:<60} {text}"


def write_tables(path: Path, result: dict[str, Any]) -> None:
    """results.md: the machine, what follows from the figures, a table for each kind, and what was not measured."""
    rows = [row for row in result["rows"] if row["status"] == "ok"]

    def of(kind: str) -> list[Row]:
        return [row for row in rows if row["kind"] == kind]
    machine = result["machine"]
    parts = [f"# {machine.get('card', 'no GPU: a self-test, whose figures mean nothing')}, {result['date']}",
             ", ".join(f"{key} {value}" for key, value in machine.items() if value is not None),
             "MFU full: 6 x matrix parameters + 12 x layers x width x length FLOP a token; causal: attention halved. "
             "Neither counts recomputation. Peak: the data sheet's dense bf16; beside it, of the best product measured "
             "here. 8b is Llama 3 8B with fewer layers, whole embedding and head.",
             *([findings] if (findings := "\n".join(f"- {text}" for text in compared(rows, result))) else []),
             _table("Peaks", of("matrix"), {
                 "product or copy": lambda row: row["part"], "TFLOP/s": lambda row: _number(row.get("tflops")),
                 "GB/s (read + written)": lambda row: _number(row.get("gb_per_s"))}),
             _table("Training steps", of("train"), {
                 "case": lambda row: f"{row['case']} ({row['layers']} layers)",
                 "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
                 "TFLOP/s full": lambda row: _number(row["tflops_full"]),
                 "MFU full": lambda row: _percent(row["mfu_full"]),
                 "MFU causal": lambda row: _percent(row["mfu_causal"]),
                 "of measured peak, full / causal": lambda row: f"{_percent(row['of_matrix_peak_full'])} / "
                                                                f"{_percent(row['of_matrix_peak_causal'])}",
                 "step ms, median (min - max)": lambda row: f"{1e3 * statistics.median(row['step_s']):.1f} "
                 f"({1e3 * min(row['step_s']):.1f} - {1e3 * max(row['step_s']):.1f}) x {len(row['step_s'])}",
                 "peak GB": lambda row: f"{row['memory_gb']:.1f}",
                 "first step, more by s": lambda row: f"{row['compile_s']:.1f}",
                 "graphs / breaks / recompiled / cached": lambda row: " / ".join(
                     str(row.get(key, 0)) for key in ("graphs", "breaks", "recompilations", "cache_hits")),
                 "MHz, W": lambda row: f"{row.get('clocks.sm', '-')}, {row.get('power.draw', '-')}"}),
             _table("One layer's attention, one sequence", [*of("attention"), *of("share")], {
                 "way": lambda row: f"{row['case'].removeprefix('attention ').split(',')[0]}: {row['part']}",
                 "forward ms": lambda row: _milliseconds(row.get("forward_s")),
                 "forward + backward ms": lambda row: _milliseconds(row.get("both_s")),
                 "TFLOP/s (causal count)": lambda row: _number(row.get("tflops")),
                 "difference from the first": lambda row: f"{row['difference']:.1e}" if "difference" in row else "-"}),
             _table("Head and loss alone", of("head"), {
                 "way": lambda row: row["part"], "forward + backward ms": lambda row: _milliseconds(row["both_s"]),
                 "TFLOP/s": lambda row: _number(row["tflops"]), "peak GB": lambda row: f"{row['memory_gb']:.1f}",
                 "gradient's norm, difference from the first": lambda row: f"{row['difference']:.1e}"}),
             _table("Checkpoint", of("checkpoint"), {
                 "GB": lambda row: f"{row['gigabytes']:.2f}", "stall s": lambda row: f"{row['stall_s']:.4f}",
                 "plain copy s": lambda row: f"{row['copy_s']:.4f}", "ratio": lambda row: f"{row['stall_ratio']:.2f}",
                 "copy GB/s": lambda row: _number(row["copy_gb_per_s"]),
                 "write GB/s": lambda row: f"{row['write_gb_per_s']:.2f}",
                 "taking the memory s": lambda row: f"{row['prepare_s']:.2f}",
                 "step ms, quiet / while writing": lambda row: f"{_milliseconds(row['step_quiet_s'])} / "
                                                               f"{_milliseconds(row['step_writing_s'])}"}),
             _table("Decoding, one prompt", of("decode"), {
                 "case": lambda row: f"{row['case']}: {row['part']}",
                 "tokens/s": lambda row: f"{row['decode_tokens_per_s']:.1f}",
                 "prompt ms": lambda row: _milliseconds(row["prefill_s"])}),
             _table("Where the time goes (kernels: profile.txt)", of("profile"), {
                 "case": lambda row: row["case"], "step ms": lambda row: _milliseconds(row["plain_s"]),
                 "kernels ms": lambda row: _milliseconds(row["busy_s"]),
                 "shares": lambda row: ", ".join(f"{name} {share:.0%}" for name, share in row["shares"].items())}),
             _table("Not measured", [row for row in result["rows"] if row["status"] != "ok"], {
                 "case": lambda row: f"{row['case']} {row['part']}".strip(), "why": lambda row: row["status"],
                 "what was said": lambda row: row.get("note", "").replace("|", "\\|")})]
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")


def compared(rows: list[Row], result: dict[str, Any]) -> list[str]:
    """Sentences with the ratios that decide something, as far as both sides were measured."""
    rates = {row["case"]: row for row in rows if row["kind"] == "train"}
    found = []
    ours = [row for row in rates.values() if row["case"].startswith("train 8b") and row["precision"] == "bf16"]
    if ours:
        best = max(ours, key=lambda row: row["tflops_full"])
        found.append(f"Best bf16 step at the 8B layer shape: {best['case']}, {best['tflops_full']:.0f} TFLOP/s, "
                     f"MFU {_percent(best['mfu_full'])} full, "
                     f"{_percent(best['mfu_causal'])} causal. The goal on an H200 is 60% full.")
    for shape in ("8b", "1b", "3b"):
        for text, one, other in [
                ("documents' mask against plain causal", "documents, compiled", "causal, compiled"),
                ("flash attention against torch's choice", "causal, flash, compiled", "causal, compiled"),
                ("cudnn's attention against torch's choice", "causal, cudnn, compiled", "causal, compiled"),
                ("weights kept between the passes", "causal, weights kept, compiled", "causal, compiled"),
                ("torch's linear_cross_entropy against our loss", "causal, linear_cross_entropy, compiled",
                 "causal, compiled"),
                ("compiled against eager", "causal, compiled", "causal, eager"),
                ("selective checkpointing against none", "causal, selective, compiled", "causal, compiled"),
                ("full checkpointing against none", "causal, full, compiled", "causal, compiled"),
                ("fp8 against bf16", "causal, fp8 by torchao, compiled", "causal, compiled")]:
            first, second = (rates.get(f"train {shape}, {name}") for name in (one, other))
            if first and second:
                found.append(f"{shape}: {text}: {first['tokens_per_s'] / second['tokens_per_s']:.3f} of its tokens/s, "
                             f"{first['memory_gb']:.1f} against {second['memory_gb']:.1f} GB.")
        for kind in ("eager", "compiled"):
            mine, theirs = rates.get(f"train {shape}, causal, {kind}"), rates.get(f"transformers {shape}, {kind}")
            if mine and theirs:
                found.append(f"{shape}: ours against transformers, both {kind}, plain causal: "
                             f"{mine['tokens_per_s'] / theirs['tokens_per_s']:.2f} of its tokens/s.")
    checkpoint = next((row for row in rows if row["kind"] == "checkpoint"), None)
    if checkpoint:
        found.append(f"A checkpoint stalls training for {checkpoint['stall_ratio']:.2f} x the time of a plain copy.")
    skipped = [row for row in result["rows"] if row["status"] == "skipped"]
    if skipped:
        found.append(f"{len(skipped)} cases were left out for lack of time.")
    return found


def _table(title: str, rows: list[Row], columns: dict[str, Callable[[Row], str]]) -> str:
    if not rows:
        return ""
    lines = [f"## {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(show(row) for show in columns.values())} |" for row in rows)])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def _plain(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
