"""A training step on this machine's CPU: our engines and layouts beside transformers and litgpt.

The shape is the reference for CPUs: vocabulary 8192, width 288, 6 layers, 6 query and 2 kv heads, feed-forward 768,
untied, fp32, batch 8 x 256, AdamW and clipping. Every candidate has processes of its own (two ranks share the threads)
and rests while another runs. MFU is of the fastest product that this machine has shown.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.apart import Apart
from benchmarks.measuring import Record, Row, Taken, alternated, compared, positive, version_of
from model.config import ModelConfig

SHAPE = ModelConfig(vocab_size=8192, dim=288, layers=6, heads=6, kv_heads=2, ffn_dim=768, context_length=256)
SEQUENCES, LENGTH = 8, 256
PRODUCTS = [(2048, 512, 512), (2048, 2048, 2048), (4096, 1024, 1024), (SEQUENCES * LENGTH, SHAPE.dim, SHAPE.dim),
            (SEQUENCES * LENGTH, SHAPE.dim, SHAPE.hidden), (SEQUENCES * LENGTH, SHAPE.hidden, SHAPE.dim)]
"""Rows, inputs and outputs of the products that the peak is looked for in: squares, and the model's own."""
CANDIDATES: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, selective checkpointing": {"train": {"activation_checkpointing": "selective"}},
    "ours, every second block": {"train": {"activation_checkpointing": "full", "recomputed_blocks": 2}},
    "ours, full checkpointing": {"train": {"activation_checkpointing": "full"}},
    "ours, compiled": {"train": {"compile": True}},
    "ours, FSDP2 x 2": {"ranks": 2},
    "ours, FSDP2 x 2, reshard never": {"ranks": 2, "parallel": {"reshard": "never"}},
    "ours, 2 copies": {"ranks": 2, "parallel": {"dp_replicate": 2}},
    "ours, tensor parallel 2": {"ranks": 2, "parallel": {"tp": 2}},
    "ours, context parallel 2": {"ranks": 2, "parallel": {"cp": 2}},
    "ours, pipeline 2": {"ranks": 2, "parallel": {"pp": 2}},
    **{f"DeepSpeed ZeRO {stage}{' x 2' if ranks == 2 else ''}": {
        "ranks": ranks, "parallel": {"engine": "deepspeed", "zero_stage": stage}, "package": "deepspeed"}
       for ranks, stage in ((1, 2), (2, 1), (2, 2), (2, 3))},
    "transformers": {"package": "transformers"},
    "transformers, compiled": {"package": "transformers", "compiled": True},
    "litgpt": {"package": "litgpt"},
}
"""By name: ranks, settings of `train` and `parallel`, the package that must be there, whether a library is compiled."""
COLUMNS = {"": "{name}", "tokens/s": "{rate:,.0f}", "of transformers'": "{wall_ratio:.2f} ({wall_least:.2f} - "
           "{wall_most:.2f})", "of transformers', processor": "{cpu_ratio:.2f}", "TFLOP/s": "{tflops:.3f}",
           "MFU, causal attention": "{mfu_causal:.1%}", "MFU, full attention": "{mfu_full:.1%}",
           "step ms, min / median / max": "{min_ms:.0f} / {median_ms:.0f} / {max_ms:.0f}",
           "peak memory MB": "{memory_mb:,.0f}"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked for."""
    parser.add_argument("--steps", type=positive, default=3, help="of each candidate in a round (%(default)s)")
    parser.add_argument("--threads", type=positive, default=2, help="shared by a candidate's ranks (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES), help="candidates")


def run(options: argparse.Namespace, record: Record) -> None:
    """Alternate rounds of each candidate."""
    import torch

    from model.kernels import chosen

    torch.set_num_threads(options.threads)
    found, peaks = {}, [matrix_peaks()]
    with ExitStack() as stack:
        for name in options.only:
            package = CANDIDATES[name].get("package")
            if package and version_of(package) is None:
                record.notes.append(f"left out: {name} ({package} is not installed)")
                print(record.notes[-1])
            else:
                found[name] = stack.enter_context(closing(Candidate(name, options.threads, options.steps)))
        taken = alternated(found, options.rounds)
    peaks.append(matrix_peaks())
    best = {library: max(peak[library] for peak in peaks) for library in peaks[0]}
    rows = compared(taken, SEQUENCES * LENGTH, "tokens", "transformers")
    for row in rows:
        candidate = found[row["name"]]
        row |= {"memory_mb": candidate.memory_mb, "min_ms": 1e3 * min(candidate.steps_s), "max_ms": 1e3 * max(
            candidate.steps_s), "median_ms": 1e3 * SEQUENCES * LENGTH / row["rate"]}
    utilised(rows, best.values())
    record.facts |= {"parameters": SHAPE.parameter_count, "batch": f"{SEQUENCES} x {LENGTH}",
                     "threads": options.threads, "capability": torch.backends.cpu.get_cpu_capability(),
                     "GFLOP/s": {name: round(rate / 1e9) for name, rate in best.items()}, "ours takes": chosen()}
    record.add("Training steps", COLUMNS, *rows)


def utilised(rows: list[Row], products: Iterable[float]) -> None:
    """Add FLOP/s and MFU, by both formulas. The ceiling is the fastest product, or the fastest step, whose products
    were faster than any that was timed alone: so nothing is used by more than 100%."""
    flops = {causal: SHAPE.flops_per_token(LENGTH, causal=causal) for causal in (True, False)}
    ceiling = max([*products, *(row["rate"] * flops[False] for row in rows)])
    for row in rows:
        row |= {"tflops": row["rate"] * flops[False] / 1e12, "mfu_causal": row["rate"] * flops[True] / ceiling,
                "mfu_full": row["rate"] * flops[False] / ceiling}


class Candidate:
    """A candidate's processes. Called: some steps; the times of the median one of them."""

    def __init__(self, name: str, threads: int, steps: int) -> None:
        count = CANDIDATES[name].get("ranks", 1)
        each = max(1, threads // count)
        self.steps, self.steps_s, self.memory_mb = steps, list[float](), 0.0
        self.apart = Apart(work, name, each, ranks=count, variables={
            "OMP_NUM_THREADS": str(each), "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""})
        self._answer()

    def __call__(self) -> Taken:
        self.apart.send(self.steps)
        times, self.memory_mb = self._answer()
        self.steps_s += [wall for wall, _ in times]
        return Taken(*sorted(times)[len(times) // 2])

    def _answer(self) -> Any:
        kind, content = self.apart.receive()
        if kind == "failed":
            self.close()
            raise RuntimeError(content)
        return content

    def close(self) -> None:
        """End the processes."""
        self.apart.end()


def work(pipe: Connection, name: str, threads: int) -> None:
    """Be a rank of a candidate: warm up, say so, and take as many steps as are asked for. Ranks but 0 say nothing."""
    import torch

    from benchmarks.steps import library_step, ranks

    torch.set_num_threads(threads)
    settings = CANDIDATES[name]
    if settings.get("package") in ("transformers", "litgpt"):
        step, leads = library_step(settings["package"], SHAPE, LENGTH, SEQUENCES, settings.get("compiled", False),
                                   torch.device("cpu"), autocast=False), True
    else:
        step, leads = ours(settings), ranks().leads
    for _ in range(3):  # allocations, compilation
        step()
    if leads:
        pipe.send(("ready", None))
    while True:
        times = []
        for _ in range(pipe.recv()):
            began, cpu = time.perf_counter(), time.process_time()
            step()
            times.append((time.perf_counter() - began, time.process_time() - cpu))
        if leads:
            pipe.send(("times", (times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)))


def ours(settings: dict[str, Any]) -> Any:
    """A step of our engine, over the ranks of this candidate."""
    import torch

    from benchmarks.steps import OurStep
    from pipeline.config.parallel import ParallelConfig
    from pipeline.config.training import TrainConfig
    from pipeline.config.tree import Config
    from pipeline.parallel.initial_values import drawn

    parallel = ParallelConfig(**settings.get("parallel", {}))
    data_ranks = settings.get("ranks", 1) // (parallel.tp * parallel.cp * parallel.pp)
    train = TrainConfig(micro_batch=SEQUENCES // data_ranks // parallel.pp, precision="fp32", sequence_length=LENGTH,
                        batch_tokens=SEQUENCES * LENGTH, **settings.get("train", {}))
    return OurStep(Config(model=SHAPE, train=train, parallel=parallel), torch.float32, drawn(SHAPE, 0), documents=False)


def matrix_peaks() -> dict[str, float]:
    """FLOP/s of the fastest fp32 product by each library here: torch's own, and oneDNN."""
    import torch

    from model.kernels import onednn_product

    libraries: dict[str, Any] = {"torch": torch.nn.functional.linear}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        libraries["oneDNN"] = onednn_product

    def rate(multiply: Any, rows: int, inputs: int, outputs: int) -> float:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)

        def seconds() -> float:
            began = time.perf_counter()
            multiply(x, weight)
            return time.perf_counter() - began
        return 2.0 * x.numel() * outputs / min(seconds() for _ in range(5))
    return {name: max(rate(multiply, *product) for product in PRODUCTS) for name, multiply in libraries.items()}
