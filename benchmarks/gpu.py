"""Everything worth knowing of one GPU within nine minutes: what it can do, and what our training makes of it.

Cases (gpu.yaml) run in the order of their worth until the time is used up; those left out are named. Each is measured
in a worker process: one that fails, hangs or takes the GPU down is a row that says so, and the rest go on in a new
worker. Tables are written after every case.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from benchmarks.apart import Apart
from benchmarks.measuring import Record, Row, cell
from pipeline.errors import UserError

GOOD = ("ok", "missing", "not here")
"""How a case may end in the self-test."""
HANGS_S = 1800.0
"""After so long a case of the self-test hangs; none takes a hundredth of that on an idle machine."""
CASES: list[Row] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ATTENTION_CASES = [f"train 8b, causal, {name}compiled" for name in ("", "flash, ", "cudnn, ")]
"""Among which the best attention is found."""
STEP = {
    "": "{name} ({layers} layers)", "tokens/s": "{rate:,.0f}", "TFLOP/s full": "{tflops_full:.1f}",
    "MFU full": "{mfu_full:.1%}", "MFU causal": "{mfu_causal:.1%}",
    "of the measured peak, full / causal": "{of_peak_full:.1%} / {of_peak_causal:.1%}",
    "step ms, median (min - max)": "{median_ms:.1f} ({min_ms:.1f} - {max_ms:.1f})", "peak GB": "{memory_gb:.1f}",
    "first step, more by s": "{compile_s:.1f}", "graphs": "{graphs}", "breaks": "{breaks}",
    "recompiled": "{recompilations}", "cached": "{cache_hits}", "clock": "{clocks_sm}", "power": "{power_draw}"}
SECTIONS: dict[str, tuple[str, Mapping[str, str]]] = {
    "matrix": ("Peaks", {"": "{name}", "TFLOP/s": "{tflops:.1f}", "GB/s (read + written)": "{gb_per_s:.1f}"}),
    "train": ("Training steps", STEP),
    "attention": ("One layer's attention, one sequence", {
        "": "{name}", "prepare ms": "{prepare_ms:.3f}", "forward ms": "{forward_ms:.3f}",
        "forward + backward ms": "{both_ms:.3f}", "TFLOP/s": "{tflops:.1f}",
        "difference from the first": "{difference:.1e}"}),
    "checkpoint": ("Checkpoint", {
        "": "{name}",
        "GB": "{gigabytes:.2f}", "stall s": "{stall_s:.4f}", "plain copy s": "{copy_s:.4f}",
        "ratio": "{stall_ratio:.2f}", "copy GB/s": "{copy_gb_per_s:.1f}", "write GB/s": "{write_gb_per_s:.2f}",
        "taking the memory s": "{prepare_s:.2f}",
        "step ms, quiet / while writing": "{quiet_ms:.1f} / {writing_ms:.1f}"})}
"""By kind: a title, and columns."""
NOT_MEASURED = ("Not measured", {"": "{name}", "why": "{status}", "what was said": "{note}"})
RATIOS = {"documents, compiled": "causal, compiled", "causal, flash, compiled": "causal, compiled",
          "causal, cudnn, compiled": "causal, compiled", "causal, weights kept, compiled": "causal, compiled",
          "causal, linear_cross_entropy, compiled": "causal, compiled", "causal, compiled": "causal, eager",
          "causal, selective, compiled": "causal, compiled", "causal, full, compiled": "causal, compiled",
          "causal, fp8 by torchao, compiled": "causal, compiled"}
"""Training steps whose ratio decides something."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked for."""
    parser.set_defaults(out=Path(f"benchmarks/gpu-{datetime.now(UTC):%Y-%m-%d}"))
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything (%(default)s)")
    parser.add_argument("--self-test", action="store_true", help="every kind of case, at a size for CPUs; fails if one "
                                                                 "fails for no good reason")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name contains one")
    parser.add_argument("--layers", type=int, help="layers of the 8B shape (default: by the card's memory)")


def run(options: argparse.Namespace, record: Record) -> bool:
    """Measure the cases that the time allows; whether a case of the self-test failed."""
    cases = [case for case in CASES if any(part in case["name"] for part in options.only)
             and (case.get("quick") or not options.self_test)]
    if not cases:
        raise UserError(f"No case's name contains {' or '.join(options.only)}; they are in benchmarks/gpu.yaml.")
    suite = Suite(options, record)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for case in cases:
            if suite.left() < (0 if options.self_test else case["seconds"] + 5):
                suite.add(case, status="skipped", note=f"{suite.left():.0f} s left, {case['seconds']} expected")
            else:
                suite.measure(case)
    finally:
        suite.end()
    return options.self_test and any(row["status"] not in GOOD for row in record.rows)


class Suite:
    """The time that is left, the worker, and what has been found."""

    def __init__(self, options: argparse.Namespace, record: Record) -> None:
        self.record, self.tiny, self.layers = record, options.self_test, options.layers
        self.log = options.out / "worker.log"
        options.out.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        self.until = time.monotonic() + (24 * 3600 if self.tiny else 60 * options.minutes)
        self.worker: Apart | None = None

    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def ok(self, kind: str) -> list[Row]:
        """What was measured of a kind."""
        return [row for row in self.record.rows if row["status"] == "ok" and row["kind"] == kind]

    def measure(self, case: Row) -> None:
        """Measure one case, in the worker at hand or a new one."""
        if case["options"].get("backend") == "best":
            found = {row["backend"]: row["rate"] for row in self.ok("train") if row["case"] in ATTENTION_CASES}
            case = {**case, "options": {**case["options"], "backend": max(found, key=found.__getitem__, default=None)}}
        if self.worker is None:
            self.worker = self.started()
        self.worker.send(case)
        limit, sound = time.monotonic() + (HANGS_S if self.tiny else 3 * case["seconds"] + 45), True
        while True:
            kind, content = self.worker.receive(min(limit, self.until) - time.monotonic())
            if kind == "row":
                self.add(case, **content)
                # After an error of the device nothing works any more; after a lack of memory some may be lost.
                sound = sound and content.get("status") not in ("failed", "oom")
            elif kind == "end":
                sound = sound and content < 0.1  # memory that was not given back would be missing in the next case
                break
            else:
                self.add(case, status="timeout" if kind == "late" else "failed", note=content)
                sound = False
                break
        if not sound:
            self.end()

    def started(self) -> Apart:
        """Start a worker, and learn of the device. UserError where there is none."""
        worker = Apart(work, self.log.parent, self.tiny, self.layers, log=self.log,
                       variables={"CUDA_VISIBLE_DEVICES": ""} if self.tiny else None)
        kind, content = worker.receive(HANGS_S if self.tiny else 180)
        if kind != "facts":
            worker.end()
            raise UserError(f"The worker did not start: {content}. Its words are in {self.log}.")
        self.record.facts |= content
        return worker

    def end(self) -> None:
        """Stop the worker."""
        if self.worker is not None:
            self.worker.end()
            self.worker = None

    def add(self, case: Row, part: str = "", **figures: Any) -> None:
        """Keep a row, with what follows from it."""
        row = {"name": case["name"] + (f": {part}" if part else ""), "case": case["name"], "kind": case["kind"],
               "status": "ok", **figures}
        peak = max((one["tflops"] for one in self.ok("matrix") if one.get("precision") == "bf16"), default=None)
        title, columns = SECTIONS[row["kind"]] if row["status"] == "ok" else NOT_MEASURED
        self.record.add(title, columns, derived(row, self.record.facts.get("datasheet_tflops"), peak))
        self.record.notes = compared(self.ok("train"))


def derived(row: Row, datasheet: float | None, measured: float | None) -> Row:
    """Add rates and utilisation, of the data sheet's peak and the measured one, as far as these are known. Full: 6 x
    matrix parameters + 12 x layers x width x length FLOP a token; causal: attention halved."""
    if row["status"] == "ok" and "step_s" in row:
        middle = statistics.median(row["step_s"])
        row |= {"rate": row["tokens"] / middle, "median_ms": 1e3 * middle, "min_ms": 1e3 * min(row["step_s"]),
                "max_ms": 1e3 * max(row["step_s"]), "compile_s": max(0.0, row["first_step_s"] - middle)}
        for count in ("causal", "full"):
            row[f"tflops_{count}"] = tflops = row["rate"] * row[f"flops_{count}"] / 1e12
            row[f"mfu_{count}"] = tflops / datasheet if datasheet else None
            row[f"of_peak_{count}"] = tflops / measured if measured else None
    return row


def compared(steps: list[Row]) -> list[str]:
    """Say the ratios that decide something, as far as both sides were measured."""
    rows = {row["case"]: row for row in steps}
    ours = [row for row in steps if row["case"].startswith("train 8b") and row["precision"] == "bf16"]
    best = max(ours, key=lambda row: row["tflops_full"], default=None)
    found = [(f"{shape}: {one} against {other}", f"train {shape}, {one}", f"train {shape}, {other}")
             for shape in ("8b", "1b", "3b") for one, other in RATIOS.items()]
    found += [(f"{shape}: ours against transformers, both {kind}, plain causal", f"train {shape}, causal, {kind}",
               f"transformers {shape}, {kind}") for shape in ("8b", "1b") for kind in ("eager", "compiled")]
    said = [cell("Best bf16 step at the 8B layer shape: {case}, {tflops_full:.0f} TFLOP/s, MFU {mfu_full:.1%} full. "
                 "The goal on an H200 is 60% full.", best)] if best and best["mfu_full"] else []
    return said + [f"{text}: {rows[one]['rate'] / rows[other]['rate']:.3f} of its tokens/s, "
                   f"{rows[one]['memory_gb']:.1f} against {rows[other]['memory_gb']:.1f} GB."
                   for text, one, other in found if one in rows and other in rows]


def work(pipe: Connection, folder: Path, tiny: bool, layers: int | None) -> None:
    """Be the worker: facts first, then the rows of each case that it is asked for, each case ended by an "end"."""
    from benchmarks.gpu_cases import Bench, Device, classify
    device = Device(tiny)
    if tiny:
        import torch
        torch.set_num_threads(1)
    elif not device.on_gpu:
        raise RuntimeError("torch sees no GPU on this machine; --self-test needs none")
    bench = Bench(device, folder, layers)
    pipe.send(("facts", device.facts()))
    while True:
        case = pipe.recv()
        print(f"\n==== {case['name']}", flush=True)
        try:
            bench.run(case["kind"], case["options"], lambda part, **figures: pipe.send(("row", {"part": part,
                                                                                                **figures})))
        except Exception as error:  # noqa: BLE001 - told to the parent, with the trace in the log
            traceback.print_exc()
            pipe.send(("row", classify(error, device.on_gpu)))
        device.fresh()
        pipe.send(("end", device.used_share()))
