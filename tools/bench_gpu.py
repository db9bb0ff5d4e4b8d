"""Everything worth knowing of one GPU within nine minutes: what it can do, and what our training makes of it.

    tools/bench_gpu.sh                    # benchmarks/gpu-<date>/results.md and results.json
    tools/bench_gpu.sh --self-test        # every kind of case at a CPU's size; fails if one fails for no good reason
    tools/bench_gpu.sh --only 'train 8b'  # cases whose name contains this

Cases run in the order of their worth until the time is used up; those left out are named. Each is measured in a
worker process: one that fails, hangs or takes the GPU down is a row that says so, and the rest go on in a new
worker. Tables are written after every case.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.files import write_json
from tools.gpu_tables import derived, line, write_tables

GOOD = ("ok", "missing", "not here")
"""How a case may end in the self-test."""
SELF_TEST_S = 1800.0
"""After so long a case of it hangs; none takes a hundredth of that on an idle machine."""


@dataclass(frozen=True)
class Case:
    """One thing to measure. seconds: expected on an H100, compiling included; kind: a method of gpu_cases.Bench."""

    name: str
    kind: str
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)
    quick: bool = False  # part of the self-test


def train(name: str, seconds: float, shape: str = "8b", quick: bool = False, **options: Any) -> Case:
    """A training step of ours; documents, compiled, no activation checkpointing, unless said otherwise."""
    return Case(f"train {shape}, {name}", "train", seconds, {"shape_name": shape, **options}, quick)


def causal(name: str, seconds: float, shape: str = "8b", quick: bool = False, **options: Any) -> Case:
    """The same with plain causal attention: one document a sequence, no mask."""
    return train(f"causal, {name}", seconds, shape, quick, documents=False, **options)


CASES = [
    Case("peaks", "matrix", 10, quick=True),
    causal("compiled", 60, quick=True),
    train("documents, compiled", 30, quick=True),
    Case("attention 8b, causal", "attention", 8, {"shape_name": "8b", "packed": False}, True),
    Case("attention 8b, documents", "attention", 30, {"shape_name": "8b", "packed": True}, True),
    Case("attention 8b, context parallel", "share", 10, {"shape_name": "8b"}, True),
    causal("flash, compiled", 15, backend="flash", quick=True),
    causal("cudnn, compiled", 15, backend="cudnn", quick=True),
    causal("best attention, 2 sequences, compiled", 25, backend="best", sequences=2, quick=True),
    causal("best attention, 2 sequences, accumulation 4, weights kept, compiled", 30, backend="best", sequences=2,
           accumulation=4, reshard="never", quick=True),
    causal("eager", 10, compiled=False, quick=True),
    Case("head 8b", "head", 15, {"shape_name": "8b"}, True),
    causal("selective, compiled", 25, checkpointing="selective", quick=True),
    causal("full, compiled", 20, checkpointing="full", quick=True),
    Case("profile of the best", "profile", 25, quick=True),
    train("documents, compiled", 25, "1b", quick=True),
    causal("compiled", 20, "1b"),
    Case("transformers 8b, eager", "train", 20, {"shape_name": "8b", "library": "transformers", "compiled": False},
         True),
    causal("best attention, 4 sequences, compiled", 25, backend="best", sequences=4),
    Case("checkpoint 1b, 4 layers", "checkpoint", 40, {"shape_name": "1b", "layers": 4}, True),
    Case("decode 1b", "decode", 20, {"shape_name": "1b"}, True),
    causal("selective, compiled", 25, "3b", checkpointing="selective"),
    causal("linear_cross_entropy, compiled", 15, loss="linear_cross_entropy", quick=True),
    Case("transformers 8b, compiled", "train", 60, {"shape_name": "8b", "library": "transformers", "compiled": True},
         True),
    causal("fp8 by torchao, compiled", 60, fp8=True, quick=True),
    train("documents, flash, compiled", 15, backend="flash"),
    train("documents, efficient, compiled", 20, backend="efficient", quick=True),
    causal("weights kept, compiled", 15, reshard="never", quick=True),
    train("documents, eager", 10, compiled=False),
    train("documents, selective, eager", 10, compiled=False, checkpointing="selective", quick=True),
    train("documents, full, eager", 10, compiled=False, checkpointing="full", quick=True),
    causal("loss by torch's operators, compiled", 15, loss="ours, chunks of 2048"),
    causal("chunks of 4096, compiled", 15, loss="ours, chunks of 4096"),
    causal("plain loss compiled, compiled", 20, loss="plain, compiled"),
    causal("best attention, 4 sequences, compiled", 15, "1b", backend="best", sequences=4),
    causal("eager", 10, "1b", compiled=False),
    causal("selective, 4 sequences, compiled", 20, "1b", checkpointing="selective", sequences=4),
    causal("compiled", 20, "3b"),
    causal("full, compiled", 20, "3b", checkpointing="full"),
    train("documents, compiled", 20, "3b"),
    causal("efficient, compiled", 15, backend="efficient"),
    Case("attention 1b, causal", "attention", 8, {"shape_name": "1b", "packed": False}),
    Case("transformers 1b, eager", "train", 15, {"shape_name": "1b", "library": "transformers", "compiled": False}),
    Case("decode 3b", "decode", 20, {"shape_name": "3b"}),
]


ATTENTION_CASES = [f"train 8b, causal, {name}compiled" for name in ("", "flash, ", "cudnn, ")]
"""Among which the best attention is found."""


def work(pipe: Connection, folder: Path, tiny: bool, layers: int | None) -> None:
    """A worker: facts first, then the rows of each case that it is asked for, each case ended by an "end"."""
    os.setpgrp()  # with its children, so that all can be ended together
    log = os.open(folder / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from tools.gpu_cases import Bench
    from tools.gpu_kernels import Device, classify
    device = Device(tiny)
    if tiny:
        import torch
        torch.set_num_threads(1)
    elif not device.on_gpu:
        pipe.send(("error", "torch sees no GPU on this machine. For a trial of the script itself use --self-test."))
        return
    bench = Bench(device, folder, layers)
    pipe.send(("facts", device.facts()))
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        print(f"\n==== {case.name}", flush=True)
        try:
            bench.run(case.kind, case.options, lambda name, **figures: pipe.send(("row", {"part": name, **figures})))
        except Exception as error:  # noqa: BLE001 - told to the parent, with the trace in the log
            traceback.print_exc()
            status, note = classify(error, device.on_gpu)
            pipe.send(("row", {"part": "", "status": status, "note": note}))
        device.fresh()
        pipe.send(("end", device.left_share()))


class Worker:
    """A worker process as the parent sees it."""

    def __init__(self, folder: Path, tiny: bool, layers: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, folder, tiny, layers))
        self.process.start()
        theirs.close()

    def receive(self, until: float) -> tuple[str, Any]:
        """The next message; ("late", ...) when the time is up, ("dead", ...) when the process is."""
        try:
            if self.pipe.poll(max(0.0, until - time.monotonic())):
                message: tuple[str, Any] = self.pipe.recv()
                return message
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            return "dead", f"the worker ended with status {self.process.exitcode}; see worker.log"
        return "late", "took too long; stopped"

    def end(self) -> None:
        """Stop it and whatever it has started."""
        self.pipe.close()
        self.process.join(0.5)
        if self.process.pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()


class Suite:
    """The cases, the time that is left, and what has been found."""

    def __init__(self, folder: Path, minutes: float, tiny: bool, layers: int | None) -> None:
        self.folder, self.tiny, self.layers = folder, tiny, layers
        self.began, self.until = time.monotonic(), time.monotonic() + 60 * minutes
        self.result: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "self_test": tiny,
                                       "minutes": minutes, "machine": {}, "rows": []}
        self.worker: Worker | None = None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def run(self, cases: list[Case]) -> None:
        """All cases that the time allows."""
        try:
            for case in cases:
                if self.left < (5 if self.tiny else case.seconds + 5):  # the self-test's sizes are others
                    self.add(case, {"part": "", "status": "skipped",
                                    "note": f"{max(0, self.left):.0f} s left, {case.seconds:.0f} expected"})
                else:
                    self.measure(case)
                self.save()
        finally:
            if self.worker is not None:
                self.worker.end()
            self.result["seconds"] = round(time.monotonic() - self.began, 1)
            self.save()

    def measure(self, case: Case) -> None:
        """One case, in the worker at hand or a new one."""
        if case.kind == "profile":
            best = self.best_step()
            if best is None:
                self.add(case, {"part": "", "status": "skipped", "note": "no training step was measured"})
                return
            case = replace(case, name=f"profile of {best}",
                           options=next(known.options for known in CASES if known.name == best))
        if case.options.get("backend") == "best":  # that of a profiled case too
            rates = {row["backend"]: row["tokens_per_s"] for row in self.result["rows"] if row["status"] == "ok"
                     and row["case"] in ATTENTION_CASES}
            case = replace(case, options={**case.options, "backend": max(rates, key=rates.__getitem__, default=None)})
        worker = self.ready_worker()
        with contextlib.suppress(OSError):  # it has died since: receiving says so
            worker.pipe.send(case)
        began = time.monotonic()
        until = min(self.until, began + (SELF_TEST_S if self.tiny else 3 * case.seconds + 45))
        sound = True
        while True:
            kind, content = worker.receive(until)
            if kind == "row":
                self.add(case, content)
                # After an error of the device nothing works any more; after a lack of memory some may be lost.
                sound = sound and content.get("status") not in ("failed", "oom")
            elif kind == "end":
                sound = sound and content < 0.1  # memory that was not given back would be missing in the next case
                break
            else:
                self.add(case, {"part": "", "status": "timeout" if kind == "late" else "failed", "note": content})
                sound = False
                break
        self.result.setdefault("case_seconds", {})[case.name] = round(time.monotonic() - began, 1)
        if not sound:
            worker.end()
            self.worker = None

    def ready_worker(self) -> Worker:
        """The worker, started if there is none."""
        if self.worker is None:
            self.worker = Worker(self.folder, self.tiny, self.layers)
            kind, content = self.worker.receive(time.monotonic() + (SELF_TEST_S if self.tiny else 180))
            if kind != "facts":
                raise SystemExit(f"The worker did not start: {content}" + (
                    "" if kind == "error" else f"\n{(self.folder / 'worker.log').read_text()[-2000:]}"))
            self.result["machine"].update(content)
        return self.worker

    def add(self, case: Case, row: dict[str, Any]) -> None:
        """Keep a row, with what follows from it, and print it."""
        row = {"case": case.name, "kind": case.kind, "status": "ok", **row}
        self.result["rows"].append(derived(row, self.result))
        print(line(row), flush=True)

    def best_step(self) -> str | None:
        """The case of ours with the most TFLOP/s, of those with one micro-batch."""
        ours = [row for row in self.result["rows"] if row["status"] == "ok" and row["case"].startswith("train 8b")
                and row["precision"] == "bf16" and "accumulation" not in row["case"]]
        return max(ours, key=lambda row: row["tflops_full"])["case"] if ours else None

    def save(self) -> None:
        """Both files, whole at any moment."""
        write_json(self.folder / "results.json", self.result)
        write_tables(self.folder / "results.md", self.result)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 if a self-test's case failed."""
    parser = argparse.ArgumentParser(prog="tools/bench_gpu.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="time for everything (default 9; of the self-test, all it takes)")
    parser.add_argument("--self-test", action="store_true", help="every kind of case at a size for CPUs")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--layers", type=int, help="layers of the 8B shape (default: by the card's memory)")
    parser.add_argument("--out", type=Path, help="folder (default $OUT, else benchmarks/gpu-<date>)")
    options = parser.parse_args(arguments)
    folder = options.out or Path(os.environ.get("OUT") or f"benchmarks/gpu-{datetime.now(UTC):%Y-%m-%d}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "worker.log").unlink(missing_ok=True)
    if options.self_test:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also where there is a GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cases = [case for case in CASES if any(part in case.name for part in options.only)
             and (case.quick or not options.self_test)]
    minutes = options.minutes or (24 * 60.0 if options.self_test else 9.0)
    suite = Suite(folder, minutes, options.self_test, options.layers)
    suite.run(cases)
    print(f"{folder / 'results.md'}: {len(suite.result['rows'])} rows in {suite.result['seconds']:.0f} s")
    bad = [row for row in suite.result["rows"] if row["status"] not in GOOD]
    for row in bad if options.self_test else []:
        print(f"FAILED {row['case']} {row['part']}: {row['status']}: {row.get('note')}", file=sys.stderr)
    return 1 if options.self_test and bad else 0


if __name__ == "__main__":
    sys.exit(main())
