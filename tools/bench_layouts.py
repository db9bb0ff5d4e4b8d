"""Training steps at the layouts of the shipped recipes, on a node of eight GPUs or on several.

    python -m tools.bench_layouts                                # the GPUs of this machine
    srun -N 4 --ntasks-per-node 1 python -m tools.bench_layouts  # 4 nodes, in an allocation of Slurm
    python -m tools.bench_layouts --only 8b                      # layouts whose name contains this
    python -m tools.bench_layouts --rehearse                     # all of them on fake tensors, without a GPU (minutes)
    python -m tools.bench_layouts --self-test                    # on two CPU ranks, at a CPU's size

For each layout: tokens per second and GPU, MFU, the peak of memory, the share of the step in which a GPU only waits for
collectives, and the share of the calls of blocks that ran compiled; beside what torchtitan published for the same on 8
H100. Recipes that are too large for eight GPUs are measured with fewer layers. Each layout runs in processes of its own
(torchrun): one that fails or hangs is a row that says so. Results: benchmarks/layouts-<date>/results.md and .json,
written after every layout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from pipeline.config.loading import load_config
from pipeline.config.tree import Config
from pipeline.contract.stages import REPOSITORY
from pipeline.errors import UserError
from pipeline.files import write_json, write_text

LIMIT_S = 900
"""After so long a layout is ended; compiling takes most of it."""
PORT = 29540
"""Of the first layout; each has its own, so that ranks of two never meet."""


@dataclass(frozen=True)
class Layout:
    """A recipe with settings laid over it.

    nodes: the fewest that it makes sense on. published: torchtitan's tokens/s and GPU for it on 8 H100
    (docs/performance.md there, read 2026-11-25: local batch 2, without documents' masks).
    """

    name: str
    recipe: str
    settings: tuple[str, ...] = ()
    nodes: int = 1
    published: int | None = None


VOCABULARY = 128_256
TINY = ModelConfig(dim=64, layers=4, heads=4, kv_heads=2, ffn_dim=128, vocab_size=512, context_length=256)
"""The self-test's model."""
FP8 = ("train.precision=fp8", "train.fp8_recipe=tensorwise", "train.fp8_skip=[small]")
LAYOUTS = (
    Layout("8b", "llama3_8b", published=6667),
    Layout("8b, eager", "llama3_8b", ("train.compile=false",), published=5762),
    Layout("8b, fp8", "llama3_8b", FP8, published=8532),
    Layout("8b, weights gathered for each pass", "llama3_8b", ("parallel.reshard=always",), published=6667),
    Layout("8b, a copy on each node", "llama3_8b", ("parallel.dp_replicate=-1", "parallel.dp_shard=8"), nodes=2),
    Layout("8b, tp 8", "llama3_8b", ("parallel.tp=8",)),
    Layout("8b, tp 8, async", "llama3_8b", ("parallel.tp=8", "parallel.async_tp=true")),
    Layout("8b, pp 2 x tp 4", "llama3_8b", ("parallel.tp=4", "parallel.pp=2", "parallel.pp_schedule=interleaved",
                                            "parallel.pp_stages=2")),
    Layout("8b at 131,072 tokens, cp 8", "llama3_8b_128k"),
    Layout("8b at 131,072 tokens, cp 4, full, fp8", "llama3_8b_128k", (
        "parallel.cp=4", "train.activation_checkpointing=full", *FP8), published=1071),
    Layout("1b", "llama3.2_1b"),
    Layout("70b, 16 of 80 layers, tp 8", "llama3_70b", ("model.layers=16", "parallel.pp=1")),
    Layout("70b, 16 of 80 layers, pp 2 x tp 4", "llama3_70b", ("model.layers=16", "parallel.pp=2", "parallel.tp=4",
                                                               "train.recomputed_blocks=1")),
    Layout("405b, 4 of 126 layers, tp 8", "llama3_405b", ("model.layers=4", "parallel.pp=1")),
)


@dataclass
class Row:
    """What a layout gave, or why nothing; figures of rank 0, `tokens_per_s` of a GPU."""

    layout: str
    status: str = "ok"
    gpus: int = 0
    tokens_per_s: float | None = None
    mfu: float | None = None
    step_s: list[float] = field(default_factory=list)
    peak_gb: float | None = None
    exposed: float | None = None
    compiled_share: float | None = None
    published: int | None = None
    note: str = ""


def config_of(layout: Layout, gpus: int, tiny: bool = False) -> Config:
    """The run of a layout on so many GPUs: two micro-batches a rank and step, in a pipeline four for each of its ranks.

    tiny: at a CPU's size, with axes of 2 at most.
    """
    config = load_config(REPOSITORY / "configs" / f"{layout.recipe}.yaml",
                         [f"model.vocab_size={VOCABULARY}", *layout.settings])
    parallel, train = config.parallel, config.train
    if tiny:
        config = config.model_copy(update={"model": TINY})
        train = train.model_copy(update={"sequence_length": 128, "micro_batch": 1, "recomputed_blocks": 1,
                                         "fp8_skip": []})
        left, axes = gpus, dict[str, object]()
        for axis in ("pp", "cp", "tp"):
            axes[axis] = size = min(getattr(parallel, axis), left)
            left //= size
        parallel = parallel.model_copy(update={**axes, "dp_shard": -1, "dp_replicate": 1, "async_tp": False,
                                               "pp_stages": min(parallel.pp_stages, 2)})
    sizes = parallel.sizes(gpus)
    accumulation = 4 * sizes.pipeline if sizes.pipeline > 1 else 2
    train = train.model_copy(update={"batch_tokens": sizes.replicate * sizes.shard * train.micro_batch * accumulation
                                     * train.sequence_length})
    return config.model_copy(update={"parallel": parallel, "train": train})


def measure(layout: Layout, tiny: bool) -> Row | None:
    """On every rank of a torchrun: steps of the layout; the row, on rank 0."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from pipeline.config.batch import BatchPlan
    from pipeline.parallel.compiling import compiled_share
    from pipeline.parallel.context_parallel import part_of
    from pipeline.parallel.grid import Grid
    from pipeline.parallel.ranks import start_ranks, stop_ranks
    from pipeline.training.device_facts import memory_mb, peak_flops
    from pipeline.training.engines.build import build_engine
    from pipeline.training.guards import StepLimits
    from tools.gpu_cases import batch, fill

    if tiny:
        torch.set_num_threads(1)
    ranks = start_ranks()
    config = config_of(layout, ranks.world, tiny)
    grid, model = Grid(ranks, config.parallel), config.model
    plan = BatchPlan.of(config.train, config.parallel, ranks.world)
    engine: Any = build_engine(config, model, grid, torch.bfloat16, plan.accumulation, None)
    fill(engine.model, model)
    own = batch(model, plan.sequence_length, plan.micro_batch * plan.accumulation, seed=grid.data_rank)
    first_of_its_data = grid.tensor_rank == grid.context_rank == grid.pipeline_rank == 0
    targets = round(ranks.sum(float(own.targets * first_of_its_data))[0])
    if grid.context > 1:
        own = part_of(own, grid.context, grid.context_rank)

    def step() -> float:
        began = time.perf_counter()
        result = engine.step(own.split(plan.micro_batch), plan.accumulation, targets, 1e-5, StepLimits())
        if not result.applied:  # the limits leave out what is NaN, and nothing else
            raise ArithmeticError(f"the step gave {result}")
        return time.perf_counter() - began  # the loss has come to the host by then

    for _ in range(1 if tiny else 3):
        step()
    compiled_share()
    times = sorted(step() for _ in range(2 if tiny else 8))
    share, on_gpu = compiled_share(), ranks.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        step()
    kernels = [(event.time_range.start, event.time_range.end, event.name) for event in seen.events() or ()
               if event.device_type == torch.autograd.DeviceType.CUDA]
    rate, peak = plan.tokens / ranks.world / statistics.median(times), peak_flops(ranks.device)
    row = Row(layout.name, "ok", ranks.world, rate,
              None if peak is None else rate * model.flops_per_token(plan.sequence_length, causal=False) / peak,
              times, memory_mb(ranks.device) / 1e3, exposed(kernels) if kernels else None, share,
              None if tiny else layout.published)
    leads = ranks.leads
    stop_ranks()
    return row if leads else None


def exposed(kernels: Sequence[tuple[float, float, str]]) -> float:
    """The share of the time in which collectives ran and nothing else did. kernels: (begin, end, name) of a device."""
    spans = {True: list[tuple[float, float]](), False: list[tuple[float, float]]()}
    for begin, end, name in kernels:
        spans[name.startswith(("nccl", "rccl"))].append((begin, end))
    computing, alone = merged(spans[False]), 0.0
    for begin, end in merged(spans[True]):
        alone += end - begin - sum(max(0.0, min(end, last) - max(begin, first)) for first, last in computing)
    return alone / (max(end for _, end, _ in kernels) - min(begin for begin, _, _ in kernels))


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time that do not overlap, in order, which cover the same."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def torchrun(number: int, layout: Layout, gpus: int, nodes: int, tiny: bool, folder: Path) -> Row:
    """A layout in processes of its own, on this node and on the others, which all call this; its row, on the first."""
    result, log_file = folder / f"{number}.json", folder / f"{number}.node{node()}.log"
    result.unlink(missing_ok=True)
    meeting = (["--standalone"] if nodes == 1 else
               ["--nnodes", str(nodes), "--node-rank", str(node()),
                "--master-addr", first_address(), "--master-port", str(PORT + number)])
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(gpus),
               "-m", "tools.bench_layouts", "--worker", str(number), str(result), *(["--self-test"] if tiny else [])]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if tiny else {})}
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            return Row(layout.name, "took too long", published=layout.published, note=f"more than {LIMIT_S} s")
    if status == 0 and result.exists():
        return Row(**json.loads(result.read_text()))
    said = [text for text in log_file.read_text(errors="replace").splitlines() if "Error: " in text]
    return Row(layout.name, "failed", published=layout.published, note=(said or [f"status {status}"])[0].strip()[:300])


def node() -> int:
    """The number of this node in a step of Slurm's; 0 elsewhere."""
    return int(os.environ.get("SLURM_NODEID", "0"))


def first_address() -> str:
    """By which the first node of this allocation of Slurm is reached."""
    from launch.slurm.nodes import address
    from launch.slurm.scheduler import Scheduler

    scheduler = Scheduler()
    return address(scheduler.hostnames(os.environ["SLURM_JOB_NODELIST"])[0], scheduler)


def rehearsed(layout: Layout, gpus: int) -> Row:
    """A layout on fake tensors: its peak of memory, or why it cannot be."""
    from pipeline.rehearsal.apart import rehearse_apart
    from pipeline.rehearsal.report import ends_and_middle, fullest

    try:
        config = config_of(layout, gpus)
        most = fullest(rehearse_apart(config, gpus, ends_and_middle(config, gpus)))
    except UserError as error:
        return Row(layout.name, "failed", gpus, note=str(error))
    return Row(layout.name, "rehearsed", gpus, peak_gb=most.peak.bytes / 1e9, published=layout.published)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = ["| layout | GPUs | tokens/s and GPU | torchtitan | MFU | step ms, median (min - max) | peak GB | "
             "exposed | compiled |", f"|{'---|' * 9}"]
    for row in rows:
        steps = (f"{1e3 * statistics.median(row.step_s):,.0f} ({1e3 * min(row.step_s):,.0f} - "
                 f"{1e3 * max(row.step_s):,.0f})" if row.step_s else f"{row.status} {row.note}".strip())
        lines.append(f"| {row.layout} | {row.gpus or '-'} | {shown(row.tokens_per_s, ',.0f')} | "
                     f"{shown(row.published, ',')} | {shown(row.mfu, '.1%')} | {steps.replace('|', '/')} | "
                     f"{shown(row.peak_gb, '.1f')} | {shown(row.exposed, '.1%')} | "
                     f"{shown(row.compiled_share, '.0%')} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 where a layout failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_layouts", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="layouts whose name contains one")
    parser.add_argument("--gpus", type=int, help="of this node (default: all it has)")
    parser.add_argument("--rehearse", action="store_true", help="on fake tensors, without GPUs")
    parser.add_argument("--self-test", action="store_true", help="on two CPU ranks, at a CPU's size")
    parser.add_argument("--out", type=Path, help="folder (default: benchmarks/layouts-<date>)")
    parser.add_argument("--worker", nargs=2, metavar=("NUMBER", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        row = measure(LAYOUTS[int(options.worker[0])], options.self_test)
        if row is not None:
            write_json(Path(options.worker[1]), asdict(row))
        return 0
    chosen = [(number, layout) for number, layout in enumerate(LAYOUTS)
              if any(part in layout.name for part in options.only)]
    if not chosen:
        print(f"drover stops here: No layout's name contains {' or '.join(options.only)}. They are: "
              f"{'; '.join(layout.name for layout in LAYOUTS)}.", file=sys.stderr)
        return 2
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))  # of srun; in an allocation without it, this node alone
    gpus = options.gpus or (2 if options.self_test else 8 if options.rehearse else gpus_here())
    if not gpus:
        print("drover stops here: torch sees no GPU on this machine. --rehearse and --self-test need none.",
              file=sys.stderr)
        return 2
    leads = node() == 0
    folder = options.out or Path(f"benchmarks/layouts-{datetime.now(UTC):%Y-%m-%d}")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, layout in chosen:
        if options.rehearse:
            rows.append(rehearsed(layout, gpus * max(nodes, layout.nodes)))
        elif nodes < layout.nodes:
            rows.append(Row(layout.name, "left out", note=f"needs {layout.nodes} nodes"))
        else:
            rows.append(torchrun(number, layout, gpus, nodes, options.self_test, folder))
        if leads:
            print("\n".join(table(rows[-1:]).splitlines()[2:]), flush=True)
            write_json(folder / "results.json", {"rows": [asdict(row) for row in rows]})
            write_text(folder / "results.md", table(rows))
    return int(any(row.status not in ("ok", "rehearsed", "left out") for row in rows) and leads)


def gpus_here() -> int:
    """How many GPUs this machine has."""
    import torch
    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
