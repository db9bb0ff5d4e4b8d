"""How fast does training go? Our engines, transformers and litgpt side by side in one run, as a table and JSON.

    python -m tools.bench_train
    python -m tools.bench_train --only ours transformers --json out.json

The shape is the reference for CPUs: vocabulary 8192, width 288, 6 layers, 6 query and 2 kv heads, feed-forward 768,
untied, fp32, batch 8 x 256, AdamW and clipping. Every candidate has processes of its own (two ranks: the threads are
shared out) and rests while another runs; rounds alternate, so that a slow moment of the machine meets all of them;
the median step of each is what counts. For GPUs there is tools/bench_gpu.sh.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.bench_candidates import CANDIDATES, LENGTH, SEQUENCES, SHAPE

if TYPE_CHECKING:
    from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent


class Runner:
    """A candidate's processes."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.ranks = name, CANDIDATES[name].ranks
        self.seconds: list[float] = []
        self.waited: list[float] = []
        self.memory_mb = 0.0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        each = max(1, threads // self.ranks)
        self.processes = []
        for rank in range(self.ranks):
            environment = {**os.environ, "OMP_NUM_THREADS": str(each), "PYTHONWARNINGS": "ignore",
                           "CUDA_VISIBLE_DEVICES": ""}
            if self.ranks > 1:
                environment.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.ranks),
                                   LOCAL_WORLD_SIZE=str(self.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            self.processes.append(subprocess.Popen(
                [sys.executable, "-m", "tools.bench_candidates", name, str(each)], cwd=REPOSITORY, env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        self.memory_before_mb: float = self._answer()["memory_before_mb"]

    def run(self, steps: int) -> None:
        """Take some steps."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answer = self._answer()
        self.seconds += answer["seconds"]
        self.waited += answer["waited"]
        self.memory_mb = answer["memory_mb"]

    def _answer(self) -> dict[str, Any]:
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            if line.startswith("{"):  # libraries print as well
                return dict(json.loads(line))
        raise RuntimeError(f"the candidate {self.name!r} ended with status {self.processes[0].wait()}; see above")

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


SHAPES = [(512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 1024),
          *((SEQUENCES * LENGTH, inputs, outputs) for inputs, outputs in (
              (SHAPE.dim, SHAPE.dim), (SHAPE.dim, SHAPE.hidden), (SHAPE.hidden, SHAPE.dim))),
          (256, SHAPE.dim, SHAPE.vocab_size or 0)]
"""Rows, inputs and outputs of the products that the peak is looked for in: squares, where libraries are at their best
on one processor, and the model's own, where they are on another."""


def libraries() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """What multiplies x (rows, inputs) with a weight (outputs, inputs) here: torch's own library, and oneDNN."""
    import torch

    from model.kernels import onednn_product

    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": torch.nn.functional.linear}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found["oneDNN"] = onednn_product
    return found


class MatrixPeak:
    """The fastest fp32 product that this machine has shown, of any shape and by any library: the ceiling of MFU.

    Looked for again between the rounds: while others use the machine, a single look may meet a slow moment.
    """

    def __init__(self) -> None:
        import torch

        self.operands = [(torch.randn(rows, inputs), torch.randn(outputs, inputs)) for rows, inputs, outputs in SHAPES]
        self.rates: dict[str, float] = {}

    def look(self, rounds: int = 3) -> None:
        """Time every product by every library, `rounds` times; what is fastest counts."""
        for library, multiply in libraries().items():
            for x, weight in self.operands:
                flops = 2.0 * x.numel() * weight.shape[0]
                for _ in range(rounds):
                    began = time.perf_counter()
                    multiply(x, weight)
                    rate = flops / (time.perf_counter() - began)
                    self.rates[library] = max(rate, self.rates.get(library, 0.0))


def ceiling(products: Iterable[float], reached: Iterable[float]) -> float:
    """FLOP/s that utilisation is taken of: of the fastest product, or of the training itself where that was faster (its
    products then were faster than any that was timed alone). So nothing is used by more than 100%."""
    return max([*products, *reached])


def measure(names: list[str], steps: int, rounds: int, threads: int) -> dict[str, Any]:
    """Alternate `rounds` of `steps` steps of each candidate; seconds of every step but the warm-up."""
    import torch

    from model.kernels import chosen

    missing = [name for name in names if (package := CANDIDATES[name].package)
               and importlib.util.find_spec(package) is None]
    for name in missing:
        print(f"left out: {name} ({CANDIDATES[name].package} is not installed)")
    torch.set_num_threads(threads)
    runners = [Runner(name, threads) for name in names if name not in missing]
    peak = MatrixPeak()
    for _ in range(rounds):
        peak.look()
        for runner in runners:
            runner.run(steps)
    peak.look()
    for runner in runners:
        runner.close()
    most = ceiling(peak.rates.values(), (flops(runner, causal=False) for runner in runners))
    return {"parameters": SHAPE.parameter_count, "batch": [SEQUENCES, LENGTH], "threads": threads,
            "torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(),
            "matrix_peak_gflops": round(most / 1e9, 1),
            "by_library_gflops": {name: round(rate / 1e9, 1) for name, rate in peak.rates.items()},
            "chosen": chosen(), "left_out": missing,
            "candidates": {runner.name: figures(runner, most) for runner in runners}}


def rate(runner: Runner) -> float:
    """Tokens a second, by the median step."""
    return SEQUENCES * LENGTH / statistics.median(runner.seconds)


def flops(runner: Runner, causal: bool) -> float:
    """FLOP/s of the median step; causal: attention counted by its half."""
    return rate(runner) * SHAPE.flops_per_token(LENGTH, causal=causal)


def figures(runner: Runner, peak: float) -> dict[str, Any]:
    """What a candidate's times come to. MFU is given by both formulas: attention counted whole, and its causal half."""
    causal, full = flops(runner, causal=True), flops(runner, causal=False)
    return {"ranks": runner.ranks, "tokens_per_s": round(rate(runner), 1),
            "step_s": {"min": min(runner.seconds), "median": statistics.median(runner.seconds),
                       "max": max(runner.seconds)},
            "data_wait_s": statistics.median(runner.waited), "memory_mb": round(runner.memory_mb, 1),
            "memory_before_mb": round(runner.memory_before_mb, 1), "tflops": round(full / 1e12, 4),
            "mfu_causal": round(causal / peak, 4), "mfu_full": round(full / peak, 4)}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown; ratios are to transformers, eager, where it ran. Memory: of rank 0's process."""
    rows = result["candidates"]
    base = rows.get("transformers", {}).get("tokens_per_s")
    lines = [f"{result['parameters']:,} parameters, batch {SEQUENCES} x {LENGTH}, fp32, {result['threads']} threads, "
             f"torch {result['torch']}, {result['capability']}, matrix peak {result['matrix_peak_gflops']:.0f} GFLOP/s "
             f"({', '.join(f'{name} {found:.0f}' for name, found in result['by_library_gflops'].items())}; "
             f"ours takes {result['chosen']})", "",
             "| | tokens/s | ratio | TFLOP/s | MFU, causal attention | MFU, full attention "
             "| step ms, min / median / max | data wait ms | peak memory MB |", "|---|---|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        span = " / ".join(f"{row['step_s'][key] * 1e3:.0f}" for key in ("min", "median", "max"))
        ratio = f"{row['tokens_per_s'] / base:.2f}" if base else "-"
        lines.append(f"| {name} | {row['tokens_per_s']:,.0f} | {ratio} | {row['tflops']:.3f} | {row['mfu_causal']:.1%} "
                     f"| {row['mfu_full']:.1%} | {span} | {row['data_wait_s'] * 1e3:.1f} | {row['memory_mb']:,.0f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of each candidate per round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; candidates alternate")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, shared out over a candidate's ranks")
    parser.add_argument("--only", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES), help="candidates")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    result = measure(options.only, options.steps, options.rounds, options.threads)
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
