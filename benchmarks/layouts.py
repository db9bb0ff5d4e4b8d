"""Training steps at the layouts of the shipped recipes (layouts.yaml), on a node of eight GPUs or on several:

    python -m benchmarks layouts                                # the GPUs of this machine
    srun -N 4 --ntasks-per-node 1 python -m benchmarks layouts  # 4 nodes, in an allocation of Slurm
    python -m benchmarks layouts --rehearse                     # all of them on fake tensors, without a GPU (minutes)
    python -m benchmarks layouts --self-test                    # on two CPU ranks, at a CPU's size

For each layout: tokens per second and GPU, MFU, the peak of memory, the share of the step in which a GPU only waits for
collectives, and the share of the calls of blocks that ran compiled; beside what torchtitan published for the same on 8
H100. Recipes that are too large for eight GPUs are measured with fewer layers. Each layout runs in processes of its
own: one that fails or hangs is a row that says so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import yaml

from benchmarks.apart import Apart
from benchmarks.measuring import Record, Row, positive
from model.config import ModelConfig
from pipeline.config.loading import load_config
from pipeline.config.tree import Config
from pipeline.contract.stages import REPOSITORY
from pipeline.errors import UserError

LIMIT_S = 900
"""After so long a layout is ended; compiling takes most of it."""
PORT = 29540
"""Of the first layout on several nodes; each has its own, so that ranks of two never meet."""
TINY = ModelConfig(dim=64, layers=4, heads=4, kv_heads=2, ffn_dim=128, vocab_size=512, context_length=256)
"""The self-test's model."""
LAYOUTS: list[Row] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
COLUMNS = {"layout": "{name}", "GPUs": "{gpus}", "tokens/s and GPU": "{rate:,.0f}", "torchtitan": "{published:,}",
           "MFU": "{mfu:.1%}", "step ms, median (min - max)": "{step}", "peak GB": "{peak_gb:.1f}",
           "exposed": "{exposed:.1%}", "compiled": "{compiled:.0%}"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked for."""
    parser.set_defaults(out=Path(f"benchmarks/layouts-{datetime.now(UTC):%Y-%m-%d}"))
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="layouts whose name contains one")
    parser.add_argument("--gpus", type=positive, help="of this node (default: all it has)")
    parser.add_argument("--rehearse", action="store_true", help="on fake tensors, without GPUs")
    parser.add_argument("--self-test", action="store_true", help="on two CPU ranks, at a CPU's size")


def run(options: argparse.Namespace, record: Record) -> bool:
    """Measure the layouts; whether one failed, on the first node."""
    chosen = [(number, layout) for number, layout in enumerate(LAYOUTS)
              if any(part in layout["name"] for part in options.only)]
    if not chosen:
        raise UserError(f"No layout's name contains {' or '.join(options.only)}. They are: "
                        f"{'; '.join(layout['name'] for layout in LAYOUTS)}.")
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))  # of srun; in an allocation without it, this node alone
    gpus = options.gpus or (2 if options.self_test else 8 if options.rehearse else gpus_here())
    if not gpus:
        raise UserError("torch sees no GPU on this machine. --rehearse and --self-test need none.")
    options.out.mkdir(parents=True, exist_ok=True)
    if node() > 0:  # the first node writes
        record.folder = None
    for number, layout in chosen:
        if options.rehearse:
            row = rehearsed(layout, gpus * max(nodes, layout.get("nodes", 1)))
        elif nodes < layout.get("nodes", 1):
            row = {"status": "left out", "step": f"left out: needs {layout['nodes']} nodes"}
        else:
            row = apart(number, gpus, nodes, options.self_test, options.out)
        row = {"name": layout["name"], **({} if options.self_test else {"published": layout.get("published")}), **row}
        record.add("Layouts", COLUMNS, row)
    return node() == 0 and any(row["status"] == "failed" for row in record.rows)


def config_of(layout: Row, gpus: int, tiny: bool = False) -> Config:
    """The run of a layout on so many GPUs: two micro-batches a rank and step, in a pipeline four for each of its ranks.

    tiny: at a CPU's size, with axes of 2 at most.
    """
    config = load_config(REPOSITORY / "configs" / f"{layout['recipe']}.yaml",
                         ["model.vocab_size=128256", *layout.get("settings", [])])
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
    accumulation = 4 * sizes.pipeline if sizes.pipeline > 1 else 2
    train = train.model_copy(update={"batch_tokens": sizes.replicate * sizes.shard * train.micro_batch * accumulation
                                     * train.sequence_length})
    return config.model_copy(update={"parallel": parallel, "train": train})


def apart(number: int, gpus: int, nodes: int, tiny: bool, folder: Path) -> Row:
    """A layout in processes of its own, on this node and on the others, which all call this; its row."""
    ranks = Apart(work, number, tiny, ranks=gpus, node=node(), nodes=nodes, log=folder / f"{number}.node{node()}.log",
                  variables={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if tiny else None,
                  **({"address": first_address(), "port": PORT + number} if nodes > 1 else {}))
    try:
        kind, content = ranks.receive(LIMIT_S)
    finally:
        ranks.end()
    return content if kind == "row" else {"status": "failed", "step": content}


def work(pipe: Connection, number: int, tiny: bool) -> None:
    """Be a rank: steps of a layout, and its row, which the first rank of each node sends."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.steps import OurStep, ranks
    from pipeline.parallel.compiling import compiled_share
    from pipeline.training.device_facts import memory_mb, peak_flops

    if tiny:
        torch.set_num_threads(1)
    config, device = config_of(LAYOUTS[number], ranks().world, tiny), ranks().device
    step, times = OurStep(config, torch.bfloat16), list[float]()
    for _ in range(1 if tiny else 3):
        step()
    compiled_share()
    for _ in range(2 if tiny else 8):
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    share = compiled_share()
    with profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]) as seen:
        step()
    kernels = [(event.time_range.start, event.time_range.end, event.name) for event in seen.events() or ()
               if event.device_type == torch.autograd.DeviceType.CUDA]
    rate, peak = 1e3 * step.plan.tokens / ranks().world / statistics.median(times), peak_flops(device)
    flops = rate * config.model.flops_per_token(step.plan.sequence_length, causal=False)
    row = {"status": "ok", "gpus": ranks().world, "rate": rate, "mfu": flops / peak if peak else None,
           "step": f"{statistics.median(times):,.0f} ({min(times):,.0f} - {max(times):,.0f})", "step_ms": times,
           "peak_gb": memory_mb(device) / 1e3, "exposed": exposed(kernels) if kernels else None, "compiled": share}
    ranks().barrier()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        pipe.send(("row", row))


def exposed(kernels: Sequence[tuple[float, float, str]]) -> float:
    """The share of the time in which collectives ran and nothing else did. kernels: (begin, end, name) of a device."""
    edges = sorted((at, change, name.startswith(("nccl", "rccl")))
                   for begin, end, name in kernels for at, change in ((begin, 1), (end, -1)))
    running, alone = {True: 0, False: 0}, 0.0
    for (at, change, collective), (until, _, _) in pairwise(edges):
        running[collective] += change
        alone += (until - at) * (running[True] > 0 and not running[False])
    return alone / (edges[-1][0] - edges[0][0])


def node() -> int:
    """The number of this node in a step of Slurm's; 0 elsewhere."""
    return int(os.environ.get("SLURM_NODEID", "0"))


def first_address() -> str:
    """By which the first node of this allocation of Slurm is reached."""
    from launch.slurm.nodes import address
    from launch.slurm.scheduler import Scheduler

    scheduler = Scheduler()
    return address(scheduler.hostnames(os.environ["SLURM_JOB_NODELIST"])[0], scheduler)


def rehearsed(layout: Row, gpus: int) -> Row:
    """A layout on fake tensors: its peak of memory, or why it cannot be."""
    from pipeline.rehearsal.apart import rehearse_apart
    from pipeline.rehearsal.report import ends_and_middle, fullest

    try:
        config = config_of(layout, gpus)
        most = fullest(rehearse_apart(config, gpus, ends_and_middle(config, gpus)))
    except UserError as error:
        return {"status": "failed", "gpus": gpus, "step": str(error)}
    return {"status": "rehearsed", "gpus": gpus, "step": "rehearsed", "peak_gb": most.peak.bytes / 1e9}


def gpus_here() -> int:
    """How many GPUs this machine has."""
    import torch
    return torch.cuda.device_count()
