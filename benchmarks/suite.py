"""Measure cases in worker processes, the most important first. A case that fails, hangs or loses a GPU becomes a row
with a note, and the others continue. `train` (train.yaml): our engines and layouts on this machine's CPU, compared with
transformers, in the shape of cpu.yaml. `gpu` (gpu.yaml): matrix products and training steps of one GPU in nine minutes.
`layouts` (layouts.yaml): training steps in the layouts of the shipped recipes, on one or more nodes of eight GPUs, with
torchtitan's published figures:

    python -m benchmarks train
    python -m benchmarks gpu
    python -m benchmarks layouts                                # the GPUs of this machine
    srun -N 4 --ntasks-per-node 1 python -m benchmarks layouts  # 4 nodes, in an allocation of Slurm
    python -m benchmarks gpu --self-test                        # a small model on the CPU; layouts takes two ranks

MFU full counts 6 x matrix parameters + 12 x layers x width x length FLOPs per token; causal counts half the attention.
Exposed: the share of a step in which a GPU only waits for collectives. Compiled: the share of the calls of blocks that
ran compiled. Recipes that are too large for eight GPUs are measured with fewer layers.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
import traceback
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from benchmarks.apart import Apart, FailedError
from benchmarks.measuring import RATES, Record, Row, Taken, compared, turns
from drover.launch.processes import free_port
from drover.model.config import ModelConfig
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.core.command_line import refuse_low
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import append_line, read_lines

GOOD = ("ok", "missing", "not here", "left out")
"""Allowed results of a case in the self-test."""
HANGS_S = 900.0
"""Time limit of a case that states none; compiling takes most of it."""
PORT = 29540
"""Port of the first case on several nodes. Each case has its own, so that ranks of two cases never connect."""
TINY = ModelConfig(dim=64, layers=4, heads=4, kv_heads=2, ffn_dim=128, vocab_size=512, context_length=256)
"""The self-test's model."""
SECTIONS = {
    "step": ("Training steps", {
        "": "{name}", "GPUs": "{gpus}", "layers": "{layers}", "tokens/s and GPU": "{rate:,.0f}",
        "torchtitan": "{published:,}", "TFLOP/s full": "{tflops_full:.1f}", "MFU full": "{mfu_full:.1%}",
        "MFU causal": "{mfu_causal:.1%}", "of the measured peak": "{of_peak_full:.1%}",
        "step ms, median (min - max)": "{median_ms:.1f} ({min_ms:.1f} - {max_ms:.1f})", "peak GB": "{memory_gb:.1f}",
        "first step, extra s": "{compile_s:.1f}", "compiled": "{compiled:.0%}", "exposed": "{exposed:.1%}",
        "clock, MHz": "{clocks_sm}", "power, W": "{power_draw}"}),
    "matrix": ("Peaks", {"": "{name}", "TFLOP/s": "{tflops:.1f}"})}
"""By kind of case: a title, and columns."""
COMPARED = {**RATES, "TFLOP/s": "{tflops:.3f}", "peak memory GB": "{memory_gb:.3f}"}
NOT_MEASURED = ("Not measured", {"": "{name}", "why": "{status}", "message": "{note}"})


def cases_of(name: str) -> list[Row]:
    """The cases of gpu.yaml, layouts.yaml or train.yaml."""
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--only", nargs="+", default=[""], metavar="TEXT", help="cases with this name, or whose name contains it")
    add("--minutes", type=float, help="time limit for all cases (gpu: 9; others: none)")
    add("--steps", type=int, help="steps to time of each training case (train: 3; on a GPU 8)")
    add("--threads", type=int, default=2, help="CPU threads, shared by the ranks of a case of train (%(default)s)")
    add("--gpus", type=int, help="GPUs of this node, for layouts (default: all)")
    add("--layers", type=int, help="layers of Llama 3 8B on one GPU (default: by the card's memory)")
    add("--self-test", action="store_true", help="run a small model on the CPU; fails if a case fails unexpectedly")


def run(options: argparse.Namespace, record: Record) -> bool:
    """Measure the cases that the time allows. Returns whether one failed that should not."""
    refuse_low(options, "rounds", "minutes", "steps", "threads", "gpus", "layers")
    name, cases = options.name, chosen(options)
    gpus = 1 if name != "layouts" else options.gpus or (2 if options.self_test else gpus_here())
    if not (name == "train" or options.self_test or gpus_here()):
        raise UserError("torch sees no GPU on this machine. --self-test needs none; drover rehearse estimates the "
                        "memory of a layout.")
    suite = Suite(options, record, gpus)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for case in turns(cases, options.rounds):
            if suite.nodes < case.get("nodes", 1):
                suite.add(case, status="left out", note=f"needs {case['nodes']} nodes")
            elif suite.left() < (0 if options.self_test else case.get("seconds", 0) + 5):
                suite.add(case, status="skipped", note=f"{suite.left():.0f} s left, {case['seconds']} expected")
            else:
                suite.measure(case)
    finally:
        suite.end()
    if name == "train":
        record.add("Side by side", COMPARED, *side_by_side(suite.ok("step")))
    strict = options.self_test or name != "gpu"
    return node() == 0 and strict and any(row.get("status", "ok") not in GOOD for row in record.rows)


def chosen(options: argparse.Namespace) -> list[Row]:
    """The cases of `--only`. UserError if there are none."""
    known = {case["name"]: {"number": number, **case} for number, case in enumerate(cases_of(options.name))}
    names = set[str]()
    for text in options.only:
        names.update([text] if text in known else [name for name in known if text in name])
    if not names:
        raise UserError(f"No case of {options.name} contains {' or '.join(options.only)}. They are: "
                        f"{'; '.join(known)}.")
    given = {"layers": options.layers} | ({"steps": options.steps} if options.steps else {})
    return [{**case, **given} for name, case in known.items() if name in names
            and not (options.name == "gpu" and options.self_test and not case.get("quick"))]


def side_by_side(rows: list[Row]) -> list[Row]:
    """Training steps on a CPU over all rounds, compared with transformers'. Only of cases that succeeded in each."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    rounds = max(map(len, found.values()), default=0)
    taken = {name: [Taken(row["median_ms"] / 1e3, row["cpu_s"]) for row in own] for name, own in found.items()
             if len(own) == rounds}
    table = []
    for row in compared(taken, rows[0]["tokens"], "tokens", "transformers") if taken else ():
        last = found[row["name"]][-1]
        table.append({**row, "tflops": row["rate"] * last["flops_full"] / 1e12, "memory_gb": last["memory_gb"]})
    return table


class Suite:
    """The remaining time, the workers and the results. On several nodes each has a suite; the first writes."""

    def __init__(self, options: argparse.Namespace, record: Record, gpus: int) -> None:
        self.record, self.tiny, self.gpus = record, options.self_test, gpus
        self.threads = options.threads if options.name == "train" else 1 if self.tiny else None
        self.apart = options.name == "train"  # each case in new processes, since peak memory is measured
        self.folder = options.out or Path(f"runs/benchmarks/{options.name}-{datetime.now(UTC):%Y-%m-%d}")
        self.folder.mkdir(parents=True, exist_ok=True)
        record.folder = self.folder if node() == 0 else None
        # From srun; without it, this node alone.
        self.nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) if options.name == "layouts" else 1
        minutes = options.minutes or (9 if options.name == "gpu" and not self.tiny else 24 * 60)
        self.until = time.monotonic() + 60 * minutes
        self.workers: Apart | None = None

    def left(self) -> float:
        """Remaining seconds."""
        return self.until - time.monotonic()

    def ok(self, kind: str) -> list[Row]:
        """The successful rows of a kind."""
        return [row for row in self.record.rows if row["status"] == "ok" and row["kind"] == kind]

    def measure(self, case: Row) -> None:
        """Measure one case, in the current worker or in new ones. Several ranks are always new."""
        limit = 3 * case["seconds"] + 45 if "seconds" in case and not self.tiny else HANGS_S
        ranks = case.get("ranks", self.gpus)
        threads = None if self.threads is None else max(1, self.threads // ranks)
        if self.workers is None:
            self.workers = Apart(self.environments(case, ranks, threads), self.folder / f"node{node()}.log")
        used, failed, path = 1.0, (), self.folder / f"rows{node()}.jsonl"
        path.unlink(missing_ok=True)
        try:
            used = self.workers.call(work, case, self.tiny, threads, path, limit_s=min(limit, self.left()))[0]
        except FailedError as error:  # nothing may work any more, or memory be lost
            failed = error.args
        facts, *rows = [*read_lines(path, appended=True)] or [{}]
        self.record.facts |= facts
        for row in [*rows, *failed]:
            self.add(case, **row)
        if used >= 0.1 or ranks * self.nodes > 1 or self.apart:  # the memory in use would be missing in the next case
            self.end()

    def environments(self, case: Row, ranks: int, threads: int | None) -> list[dict[str, str]]:
        """The variables of this node's ranks."""
        shared = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)} if threads else {}
        if ranks * self.nodes == 1:
            return [shared]
        address, port = (first_address(), PORT + case["number"]) if self.nodes > 1 else ("127.0.0.1", free_port())
        shared |= {"WORLD_SIZE": str(ranks * self.nodes), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": address,
                   "MASTER_PORT": str(port)}
        return [{**shared, "RANK": str(node() * ranks + rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]

    def end(self) -> None:
        """Stop the workers."""
        if self.workers is not None:
            self.workers.end()
            self.workers = None

    def add(self, case: Row, part: str = "", **figures: Any) -> None:
        """Add a row, with derived figures."""
        kind = case.get("kind", "step")
        row = {"name": case["name"] + (f": {part}" if part else ""), "case": case["name"], "kind": kind, "status": "ok",
               "published": None if self.tiny else case.get("published"), **figures}
        peak = max((one["tflops"] for one in self.ok("matrix")), default=None)
        title, columns = SECTIONS[kind] if row["status"] == "ok" else NOT_MEASURED
        self.record.add(title, columns, derived(row, self.record.facts.get("datasheet_tflops"), peak))


def derived(row: Row, datasheet: float | None, measured: float | None) -> Row:
    """Add rates and utilisation, relative to the peaks of the data sheet and of the measurement if they are known."""
    if row["status"] == "ok" and "step_s" in row:
        middle = statistics.median(row["step_s"])
        row |= {"rate": row["tokens"] / row["gpus"] / middle, "median_ms": 1e3 * middle,
                "min_ms": 1e3 * min(row["step_s"]), "max_ms": 1e3 * max(row["step_s"]),
                "compile_s": max(0.0, row["first_step_s"] - middle)}
        for count in ("causal", "full"):
            row[f"tflops_{count}"] = tflops = row["rate"] * row[f"flops_{count}"] / 1e12
            row[f"mfu_{count}"] = tflops / datasheet if datasheet else None
            row[f"of_peak_{count}"] = tflops / measured if measured else None
    return row


def config_of(case: Row, gpus: int, tiny: bool = False) -> Config:
    """The configuration of a case on `gpus` GPUs: its recipe and settings, with `accumulation` micro-batches per rank
    and step (default: two; in a pipeline four per stage).

    tiny: a small model for a CPU, with axes of 2 at most.
    """
    # Recipes of this checkout, whichever checkout's code is measured.
    recipe = Path(__file__).resolve().parents[1] / f"{case['recipe']}.yaml"
    config = load_config(recipe, case.get("settings", []))
    config = changed(config, {"model": config.model.with_vocabulary(128_256)})
    parallel, train = config.parallel, config.train
    if tiny:
        config = config.model_copy(update={"model": TINY})
        train = train.model_copy(update={"sequence_length": 128, "micro_batch": 1, "recomputed_blocks": 1,
                                         "fp8_skip": []})
        left, axes = gpus, dict[str, int]()
        for axis in ("pp", "cp", "tp"):
            axes[axis] = min(getattr(parallel, axis), left)
            left //= axes[axis]
        parallel = parallel.model_copy(update={**axes, "dp_shard": -1, "dp_replicate": 1, "async_tp": False,
                                               "pp_stages": min(parallel.pp_stages, 2)})
    sizes = parallel.sizes(gpus)
    accumulation = case.get("accumulation", 4 * sizes.pipeline if sizes.pipeline > 1 else 2)
    train = train.model_copy(update={"batch_tokens": sizes.replicate * sizes.shard * train.micro_batch * accumulation
                                     * train.sequence_length})
    return config.model_copy(update={"parallel": parallel, "train": train})


def work(case: Row, tiny: bool, threads: int | None, path: Path) -> float:
    """Measure a case, as one of its ranks; the share of the device's memory that is in use afterwards. The first rank
    appends facts about the device and the rows to `path` as they come: they count even if a later one fails.

    Raises:
        FailedError: with the row of what failed.
    """
    import torch

    from benchmarks.cases import bench_of, classify
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    print(f"\n==== {case['name']}", flush=True)
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        bench = bench_of(tiny)
        for row in chain([bench.facts], bench.run(case)):
            if leads:
                append_line(path, row)
        return bench.used_share()
    except Exception as error:  # noqa: BLE001 - it becomes a row, and the trace is in the log
        traceback.print_exc()
        raise FailedError(classify(error)) from None


def node() -> int:
    """The number of this node in a Slurm step; 0 outside of Slurm."""
    return int(os.environ.get("SLURM_NODEID", "0"))


def first_address() -> str:
    """The address of the first node of this Slurm allocation."""
    from drover.launch.slurm.nodes import address
    from drover.launch.slurm.scheduler import Scheduler

    scheduler = Scheduler()
    return address(scheduler.hostnames(os.environ["SLURM_JOB_NODELIST"])[0], scheduler)


def gpus_here() -> int:
    """The number of GPUs of this machine."""
    import torch
    return torch.cuda.device_count()
