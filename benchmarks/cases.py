"""What a worker measures on its device: products, and training steps: ours as training takes them, over any number of
ranks, and those of transformers at the same shape."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from importlib import import_module
from itertools import pairwise
from typing import Any
from unittest import mock
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Row
from benchmarks.suite import config_of
from drover.launch.devices import smi
from drover.model.config import ModelConfig
from drover.pipeline.config.batch import BatchPlan
from drover.pipeline.config.tree import Config
from drover.pipeline.data.sampling.batch import Batch, pack
from drover.pipeline.formats.huggingface import config_to_json
from drover.pipeline.parallel.compiling import compiled_share
from drover.pipeline.parallel.context_parallel import part_of
from drover.pipeline.parallel.grid import Grid
from drover.pipeline.parallel.initial_values import InitialValues
from drover.pipeline.parallel.ranks import start_ranks
from drover.pipeline.training.device_facts import memory_mb, peak_flops
from drover.pipeline.training.engines.build import build_engine
from drover.pipeline.training.guards import StepLimits

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION}
DOCUMENT_TOKENS = 1024
"""Mean length of the made-up documents."""
Step = Callable[[], float]
"""Takes a step; returns its loss, which is on the host then."""


def classify(error: BaseException) -> Row:
    """Status and note of a failure: missing, not here, oom or failed."""
    text = f"{type(error).__name__}: {error}"
    only_for_gpus = isinstance(error, NotImplementedError) and not torch.cuda.is_available()
    unsupported = "No available kernel" in text or "No viable backend" in text or only_for_gpus
    status = ("missing" if isinstance(error, ImportError) else
              "oom" if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text else
              "not here" if unsupported else "failed")
    return {"status": status, "note": " ".join(text.split())[:300]}


class Bench:
    """All kinds of cases on one device; everything that differs between a GPU and the CPU of the self-test."""

    def __init__(self, tiny: bool) -> None:
        self.ranks = start_ranks()
        self.tiny, self.device, self.on_gpu = tiny, self.ranks.device, self.ranks.device.type == "cuda"

    @cached_property
    def facts(self) -> Row:
        """Name, sizes and peak of the device."""
        peak = peak_flops(self.device)
        found: Row = {"cuda": torch.version.cuda, "datasheet_tflops": peak and peak / 1e12,
                      "capability": torch.backends.cpu.get_cpu_capability()}
        if self.on_gpu:
            about = torch.cuda.get_device_properties(self.device)
            found |= {"card": about.name, "memory_gb": round(about.total_memory / 1e9, 1),
                      "capability": f"{about.major}.{about.minor}", "cudnn": torch.backends.cudnn.version(),
                      "nccl": str(torch.cuda.nccl.version()),
                      **self.smi("driver_version", "clocks.max.sm", "power.limit")}
        return found

    def smi(self, *fields: str) -> dict[str, str]:
        """Ask nvidia-smi about the first GPU, in MHz and W. Empty where the program is missing or fails."""
        rows = smi(f"--query-gpu={','.join(fields)}") if self.on_gpu else None
        names = [field.replace(".", "_") for field in fields]
        return dict(zip(names, (rows or [[]])[0], strict=False))

    def used_share(self) -> float:
        """The share of the device's memory that is in use; 0 on a CPU."""
        if not self.on_gpu:
            return 0.0
        return torch.cuda.memory_allocated(self.device) / torch.cuda.get_device_properties(self.device).total_memory

    def run(self, case: Row) -> Iterator[Row]:
        """Measure one case: a row for each part of it."""
        # In the self-test torch.compile traces and splits as on a GPU, and generates no code.
        compiling = mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")) if self.tiny \
            else nullcontext()
        with compiling, only_kernel(case["kernel"]) if "kernel" in case else nullcontext():
            self.fresh()
            yield from getattr(self, case.get("kind", "step"))(case)
        self.fresh()

    def fresh(self) -> None:
        """Forget compiled code and free memory: what was measured before must not weigh on what comes."""
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            dynamo.reset()
            dynamo.utils.counters.clear()
            getattr(dynamo.utils, "clear_compilation_metrics", lambda: None)()
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Time one call, with all the device's work."""
        synchronize = partial(torch.cuda.synchronize, self.device) if self.on_gpu else lambda: None
        synchronize()
        began = time.perf_counter()
        action()
        synchronize()
        return time.perf_counter() - began

    def median(self, action: Callable[[], Any]) -> float:
        """Median seconds of a short piece of work, after two calls to warm up; very short ones are timed in groups."""
        self.seconds(action)
        once = max(self.seconds(action), 1e-6)
        group = 1 if self.tiny else max(1, min(50, int(0.005 / once)))
        rounds = 2 if self.tiny else max(5, min(20, int(0.4 / (once * group))))
        return statistics.median(self.seconds(lambda: [action() for _ in range(group)]) / group
                                 for _ in range(rounds))

    def random(self, *shape: int) -> Tensor:
        """Draw a bf16 tensor."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def matrix(self, case: Row) -> Iterator[Row]:
        """Products of bf16 matrices at shapes that occur in Llamas: what the device can do at its best."""
        for rows, inner, columns in [[64, 64, 64]] if self.tiny else case["shapes"]:
            left, right, out = self.random(rows, inner), self.random(columns, inner), self.random(rows, columns)
            seconds = self.median(partial(torch.mm, left, right.t(), out=out))
            yield {"part": f"{rows} x {inner} x {columns}", "tflops": 2e-12 * rows * inner * columns / seconds}

    def step(self, case: Row) -> Iterator[Row]:
        """Seconds of training steps after the first three, what compiling took and made, memory, and for GPUs the share
        of a step in which only collectives ran."""
        step, facts = self.prepared(case)
        facts["first_step_s"] = self.seconds(step)
        for _ in range(0 if self.tiny else 2):
            step()
        compiled_share()
        cpu, times = time.process_time(), [self.seconds(step) for _ in range(case.get("steps", 2 if self.tiny else 8))]
        facts = {**facts, "cpu_s": (time.process_time() - cpu) / len(times), **self.smi("clocks.sm", "power.draw"),
                 "compiled": compiled_share(), "memory_gb": memory_mb(self.device) / 1e3}
        if self.on_gpu and self.ranks.world > 1:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                step()
            facts["exposed"] = exposed([(event.time_range.start, event.time_range.end, event.name) for event in
                                        seen.events() or () if event.device_type == torch.autograd.DeviceType.CUDA])
        self.ranks.barrier()
        yield {**facts, "step_s": times}

    def prepared(self, case: Row) -> tuple[Step, Row]:
        """A training step to be called, and what is known of it."""
        if case.get("fitted"):
            count = case.get("layers") or self.layers()
            case = {**case, "settings": [*case.get("settings", []), f"model.layers={count}"]}
        config = config_of(case, self.ranks.world, self.tiny)
        if config.train.precision == "fp8":
            import_module("torchao.float8")  # where it is absent, the row says "missing", not "failed"
        model, length = config.model, config.train.sequence_length
        step = transformers_step(config, self.device, case.get("compiled", False)) if "library" in case else \
            OurStep(self, config, case.get("documents", True), case.get("across", False))
        return step, {"gpus": self.ranks.world, "layers": model.layers, "parameters": model.parameter_count,
                      "tokens": config.train.batch_tokens, "precision": config.train.precision,
                      "flops_causal": model.flops_per_token(length, causal=True),
                      "flops_full": model.flops_per_token(length, causal=False)}

    def layers(self) -> int:
        """Layers of Llama 3 8B that leave room for two sequences of 8,192 on this device."""
        memory = torch.cuda.get_device_properties(self.device).total_memory if self.on_gpu else 0
        # 16 bytes for weights, gradients and moments: 218 M of a layer, 1.05 G of embedding and head; 2 GB a layer for
        # activations of a sequence; the head's.
        return next((count for count in (16, 8, 4) if 16 * (218e6 * count + 1.05e9) + 2e9 * count + 8e9
                     < 0.62 * memory), 2)


bench_of = cache(Bench)
"""The one of this process."""


@contextmanager
def only_kernel(name: str) -> Iterator[None]:
    """Hold torch's attention to a kernel of KERNELS. The cache of graphs does not know which one is in them."""
    with sdpa_kernel(KERNELS[name]), mock.patch.object(torch.compiler.config, "force_disable_caches", True):
        yield


class OurStep:
    """A step of our engine over all ranks, each time on the same batch.

    Args:
        documents: whether sequences hold several documents. across: whether attention ignores where these end.
    """

    def __init__(self, bench: Bench, config: Config, documents: bool, across: bool) -> None:
        ranks = bench.ranks
        grid, self.plan = Grid(ranks, config.parallel), BatchPlan.of(config.train, config.parallel, ranks.world)
        dtype = torch.float32 if config.train.precision == "fp32" else torch.bfloat16
        self.engine: Any = build_engine(config, config.model, grid, dtype, self.plan.accumulation,
                                        quickly_drawn(config.model, bench.device))
        if across:
            self.engine.across_documents = True
        self.data = batch(config.model, self.plan.sequence_length, self.plan.micro_batch * self.plan.accumulation,
                          grid.data_rank, documents)
        first_of_its_data = grid.tensor_rank == grid.context_rank == grid.pipeline_rank == 0
        self.targets = round(ranks.sum(float(self.data.targets * first_of_its_data))[0])
        if grid.context > 1:
            self.data = part_of(self.data, grid.context, grid.context_rank)

    def __call__(self) -> float:
        """Take a step. ArithmeticError where it gave NaN, which the limits leave out."""
        result = self.engine.step(self.data.split(self.plan.micro_batch), self.plan.accumulation, self.targets, 1e-5,
                                  StepLimits())
        if not result.applied:
            raise ArithmeticError(f"the step gave {result}")
        return float(result.loss)


def begins(length: int, seed: int = 0) -> list[int]:
    """Where made-up documents start in a sequence, 0 first: lengths are spread evenly around the mean."""
    random, found = np.random.default_rng(seed), [0]
    mean = min(DOCUMENT_TOKENS, length // 4)
    while found[-1] < length:
        found.append(found[-1] + int(random.integers(mean // 2, 3 * mean // 2)))
    return found[:-1]


def batch(config: ModelConfig, length: int, sequences: int, seed: int, documents: bool = True) -> Batch:
    """Random tokens, in packed documents or one document a sequence."""
    random = np.random.default_rng(seed)
    return pack([(random.integers(0, config.vocab_size or 0, length + 1),
                  np.array(begins(length, seed + row) if documents else [0])) for row in range(sequences)])


def quickly_drawn(config: ModelConfig, device: torch.device) -> InitialValues:
    """Initial values of the usual sizes, drawn on the device, equal on replicas; zeros would run faster than real
    ones."""
    def values(name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(tuple(size), device=device)
        seeded = torch.Generator(device).manual_seed(crc32(f"{name} {list(offset)}".encode()))
        std = config.dim**-0.5 if name == "output.weight" else 0.02
        return torch.randn(tuple(size), device=device, generator=seeded) * std
    return values


def transformers_step(config: Config, device: torch.device, compiled: bool) -> Step:
    """A plain step of transformers: SDPA with plain causal attention, float32 weights (bf16 by autocast),
    cross-entropy, clipping, fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, length = config.model, config.train.sequence_length
    theirs = {**config_to_json(shape, torch.float32), "attn_implementation": "sdpa", "use_cache": False}
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**theirs)).float().train()
    forward: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = batch(shape, length, config.train.batch_tokens // length, seed=0)
    tokens, labels = data.tokens.to(device), data.labels.to(device)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision != "fp32"):
            logits = forward(tokens).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
    return step


def exposed(kernels: Sequence[tuple[float, float, str]]) -> float | None:
    """The share of the time in which collectives ran and nothing else did. kernels: (begin, end, name) of a device."""
    edges = sorted((at, change, name.startswith(("nccl", "rccl")))
                   for begin, end, name in kernels for at, change in ((begin, 1), (end, -1)))
    running, alone = {True: 0, False: 0}, 0.0
    for (at, change, collective), (until, _, _) in pairwise(edges):
        running[collective] += change
        alone += (until - at) * (running[True] > 0 and not running[False])
    return alone / (edges[-1][0] - edges[0][0]) if edges else None
