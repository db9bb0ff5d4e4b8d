"""What `python -m benchmarks gpu` measures on its device: products, attention, training steps, a checkpoint. Everything
that differs between a GPU and the CPU of the self-test is in `Device`."""

from __future__ import annotations

import gc
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measuring import Row
from benchmarks.steps import OtherLosses, OurStep, Step, begins, library_step, ranks
from model.attention import BACKENDS
from model.attention.backend import Documents, Where
from model.attention.choosing import choose
from model.config import ModelConfig
from model.loss import Passes, cross_entropy_sum
from model.presets import PRESETS
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import CheckpointConfig, TrainConfig
from pipeline.config.tree import Config
from pipeline.records.checkpoints import TrainingProgress
from pipeline.training.async_saver import AsyncSaver
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.device_facts import compiled_graphs, memory_mb, peak_flops

Report = Callable[..., None]
"""Called as report(part, **figures) for each thing measured."""
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION}


class NotHereError(Exception):
    """This device or version of a library cannot do it: a fact, not a fault."""


def classify(error: BaseException, on_gpu: bool) -> Row:
    """Status and note of a failure: missing, not here, oom or failed."""
    text = f"{type(error).__name__}: {error}"
    unsupported = isinstance(error, NotHereError) or "No available kernel" in text or "No viable backend" in text
    status = ("missing" if isinstance(error, ImportError) else
              "oom" if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text else
              "not here" if unsupported or (not on_gpu and isinstance(error, NotImplementedError)) else "failed")
    return {"status": status, "note": " ".join(text.split())[:300]}


class Device:
    """The GPU, or in the self-test the CPU: `tiny` then says that sizes and repetitions are."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.on_gpu = tiny, torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    def facts(self) -> Row:
        """Name, sizes and peak."""
        peak = peak_flops(self.device)
        found: Row = {"cuda": torch.version.cuda, "datasheet_tflops": peak and peak / 1e12}
        if self.on_gpu:
            about = torch.cuda.get_device_properties(self.device)
            found |= {"card": about.name, "memory_gb": round(about.total_memory / 1e9, 1),
                      "capability": f"{about.major}.{about.minor}", "processors": about.multi_processor_count,
                      "cudnn": torch.backends.cudnn.version(), "nccl": str(torch.cuda.nccl.version()),
                      **self.smi("driver_version", "clocks.max.sm", "power.limit")}
        return found

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

    def used_share(self) -> float:
        """The share of the device's memory that is in use; 0 on a CPU."""
        whole = torch.cuda.get_device_properties(self.device).total_memory if self.on_gpu else 1
        return torch.cuda.memory_allocated(self.device) / whole if self.on_gpu else 0.0

    def peak_gb(self) -> float:
        """Most memory since `fresh` (on a CPU: of the process)."""
        return round(memory_mb(self.device) / 1e3, 3)

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

    def random(self, *shape: int, grad: bool = True) -> Tensor:
        """Draw a bf16 tensor."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16, requires_grad=grad)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Have torch.compile, in the self-test, trace and split as on a GPU and generate no code."""
        with nullcontext() if self.on_gpu else mock.patch.object(torch, "compile", partial(torch.compile,
                                                                                           backend="aot_eager")):
            yield

    def smi(self, *fields: str) -> dict[str, str]:
        """Ask nvidia-smi. Empty where the program is missing or fails."""
        if not self.on_gpu or shutil.which("nvidia-smi") is None:
            return {}
        done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"],
                              text=True, capture_output=True, timeout=60, check=False)
        names = [field.replace(".", "_") for field in fields]
        return dict(zip(names, done.stdout.strip().split(", "), strict=False))


class Bench:
    """All kinds of cases on one device. `run` is the way in."""

    def __init__(self, device: Device, folder: Path, layers: int | None) -> None:
        self.device, self.folder, self.layers = device, folder, layers

    def run(self, kind: str, options: Row, report: Report) -> None:
        """Measure one case; every figure goes through `report`."""
        with self.device.compiling():
            self.device.fresh()
            getattr(self, kind)(report, **options)

    def attempt(self, report: Report, part: str, action: Callable[[], Row]) -> None:
        """Report what `action` finds, or why it could not."""
        try:
            report(part, **action())
        except Exception as error:  # noqa: BLE001 - each measurement stands alone; the row says what happened
            report(part, **classify(error, self.device.on_gpu))

    def shape(self, name: str) -> tuple[ModelConfig, int]:
        """A published model, and the sequence length to train it at; in the self-test a very small one.

        "8b" is Llama 3 8B with `layers` of its layers, by default as many as leave room for two sequences.
        """
        if self.device.tiny:
            return ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, vocab_size=512, context_length=256,
                               tied_embeddings=name != "8b"), 128
        if name != "8b":
            return PRESETS[f"llama3.2_{name}"].model_copy(update={"context_length": 8192}), 8192
        memory = torch.cuda.get_device_properties(self.device.device).total_memory if self.device.on_gpu else 0
        for count in ([self.layers] if self.layers else [16, 8, 4, 2]):
            config = PRESETS["llama3_8b"].model_copy(update={"layers": count})
            # 16 bytes for weights, gradients and moments; 2 GB a layer for activations of a sequence; the head.
            if 16 * config.parameter_count + 2e9 * count + 8e9 < 0.62 * memory:
                break
        return config, 8192

    def matrix(self, report: Report) -> None:
        """Products of bf16 matrices at shapes that occur in Llamas, one in fp8, and a copy within the memory."""
        shapes = [(8192, 8192, 8192), (16384, 8192, 8192), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 4096),
                  (2048, 4096, 128256), (8192, 2048, 8192), (4096, 4096, 4096)]
        device, random = self.device, partial(self.device.random, grad=False)

        def product(rows: int, inner: int, columns: int) -> Row:
            left, right, out = random(rows, inner), random(columns, inner), random(rows, columns)
            seconds = device.median(lambda: torch.mm(left, right.t(), out=out))
            return {"tflops": 2e-12 * rows * inner * columns / seconds, "precision": "bf16"}

        def fp8(size: int) -> Row:
            if not device.on_gpu or torch.cuda.get_device_capability(device.device) < (8, 9):
                raise NotHereError("fp8 products need a GPU of compute capability 8.9")
            left, right = (random(size, size).to(torch.float8_e4m3fn) for _ in range(2))
            one = torch.ones((), device=device.device)
            seconds = device.median(lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one,
                                                             out_dtype=torch.bfloat16, use_fast_accum=True))
            return {"tflops": 2e-12 * size**3 / seconds, "precision": "fp8"}

        def copy(count: int) -> Row:
            source = random(count)
            target = torch.empty_like(source)
            return {"gb_per_s": 2e-9 * source.nbytes / device.median(lambda: target.copy_(source))}
        for rows, inner, columns in [(64, 64, 64)] if device.tiny else shapes:
            self.attempt(report, f"bf16 {rows} x {inner} x {columns}", partial(product, rows, inner, columns))
        self.attempt(report, "fp8 product", partial(fp8, 8192))
        self.attempt(report, "copy", partial(copy, 1 << (16 if device.tiny else 30)))

    def attention(self, report: Report, shape: str, packed: bool) -> None:
        """One layer's attention, each way of computing it: forward, and with backward, for one sequence.

        TFLOP/s are nominal: half of full attention, inside documents too, whatever a kernel really computes.
        """
        device, (config, length) = self.device, self.shape(shape)
        torch.manual_seed(0)
        q, k, v = (device.random(1, length, heads, config.head_width)
                   for heads in (config.heads, config.kv_heads, config.kv_heads))
        upstream, reference = torch.randn_like(q), list[Tensor]()  # what the first way gave: the others must agree

        def measure(run: Callable[[], Tensor]) -> Row:
            with torch.no_grad():
                out = run().float()
                reference.append(out)
                forward_s = device.median(run)
            both_s = device.median(lambda: run().backward(upstream))
            return {"forward_ms": 1e3 * forward_s, "both_ms": 1e3 * both_s,
                    "difference": float((out - reference[0]).norm() / reference[0].norm()),
                    "tflops": 6e-12 * config.heads * config.head_width * length**2 / both_s}

        def causal(kernel: str | None = None) -> Tensor:
            with sdpa_kernel(KERNELS[kernel]) if kernel else nullcontext():
                return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                                      is_causal=True, enable_gqa=True).transpose(1, 2)

        def by(name: str) -> Row:
            starts = begins(length)
            marks = torch.zeros(1, length, dtype=torch.int32)
            marks[0, starts[1:]] = 1
            documents = Documents(marks.cumsum(1, dtype=torch.int32).to(device.device),
                                  np.diff([*starts, length]).tolist())
            try:
                backend = choose(name, Where(device.device, q.dtype, False, config.head_width)).backend
            except ValueError as error:
                raise NotHereError(str(error)) from error
            prepared = backend.prepare(documents, q.dtype)
            prepare_s = device.median(lambda: backend.prepare(documents, q.dtype))
            return {**measure(lambda: backend.attend(q, k, v, prepared)), "prepare_ms": 1e3 * prepare_s}
        if packed:
            for name in BACKENDS:
                self.attempt(report, f"documents, {name}", partial(by, name))
        else:
            for kernel in (None, *KERNELS):
                self.attempt(report, f"causal, {kernel or 'the default'}", partial(measure, partial(causal, kernel)))

    def losses(self) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """Sums of cross-entropies from (hidden, weight, labels), by name."""
        def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum", ignore_index=-100)

        def torchs(*of: Tensor) -> Tensor:
            if not hasattr(F, "linear_cross_entropy"):
                raise NotHereError(f"torch {torch.__version__} has no chunked linear_cross_entropy")
            loss: Tensor = F.linear_cross_entropy(*of, reduction="sum", ignore_index=-100,
                                                  options=torch.nn.LinearCrossEntropyOptions())
            return loss
        return {**{f"ours, chunks of {chunk}": partial(cross_entropy_sum, chunk_tokens=chunk)
                   for chunk in ((16, 64) if self.device.tiny else (1024, 2048, 4096, 8192))},
                "ours, compiled": partial(cross_entropy_sum, passes=Passes.compiled()), "linear_cross_entropy": torchs,
                "plain": plain, "plain, compiled": torch.compile(plain)}

    def train(self, report: Report, **options: Any) -> None:
        """Seconds of training steps after the first three, and what compiling took and made."""
        device, tiny, times = self.device, self.device.tiny, list[float]()
        with self.step(**options) as (step, facts):
            first_step_s = device.seconds(step)
            for _ in range(0 if tiny else 2):
                step()
            while len(times) < (2 if tiny else 5) or (sum(times) < 3 and len(times) < (2 if tiny else 12)):
                times.append(device.seconds(step))
            report("", **facts, first_step_s=first_step_s, step_s=sorted(times), memory_gb=device.peak_gb(),
                   **compile_counts(), **device.smi("clocks.sm", "power.draw"))

    @contextmanager
    def step(self, shape: str, documents: bool = True, backend: str | None = None, checkpointing: str = "none",
             compiled: bool = True, sequences: int = 1, accumulation: int = 1, loss: str | None = None,
             fp8: bool = False, reshard: str = "always", library: str | None = None) -> Iterator[tuple[Step, Row]]:
        """A training step to be called, and what is known of it; everything is let go afterwards."""
        config, length = self.shape(shape)
        precision = "fp8" if fp8 else "bf16"
        facts = {"shape": shape, "layers": config.layers, "parameters": config.parameter_count, "precision": precision,
                 "tokens": sequences * accumulation * length, "backend": backend,
                 "flops_causal": config.flops_per_token(length, causal=True),
                 "flops_full": config.flops_per_token(length, causal=False)}
        with ExitStack() as stack:
            if backend:
                stack.enter_context(sdpa_kernel(KERNELS[backend]))
            if library:
                yield library_step(library, config, length, sequences, compiled, self.device.device, True), facts
                return
            if fp8:
                import_module("torchao.float8")  # where it is absent, the row says "missing", not "failed"
            step = self.ours(config, length, sequences, accumulation, documents, reshard, compile=compiled,
                             activation_checkpointing=checkpointing, precision=precision, fp8_recipe="tensorwise")
            if loss:
                step.engine.model.losses = OtherLosses(self.losses()[loss])
            yield step, facts

    def ours(self, config: ModelConfig, length: int, sequences: int = 1, accumulation: int = 1, documents: bool = True,
             reshard: str = "always", **train: Any) -> OurStep:
        """A step of our engine in one process."""
        settings = Config(model=config, parallel=ParallelConfig.model_validate({"reshard": reshard}),
                          train=TrainConfig(**{"precision": "bf16", "compile": False, **train}, sequence_length=length,
                                            micro_batch=sequences, batch_tokens=sequences * accumulation * length))
        return OurStep(settings, torch.bfloat16, documents=documents, across=not documents)

    def checkpoint(self, report: Report, shape: str, layers: int) -> None:
        """What saving costs: the copy that stalls the loop, a plain copy of as many bytes, writing, steps meanwhile."""
        device, (config, length) = self.device, self.shape(shape)
        step = self.ours(config.model_copy(update={"layers": min(layers, config.layers)}), length)
        step()
        with tempfile.TemporaryDirectory(prefix="drover-checkpoint-") as folder:
            said = list[str]()
            saver = AsyncSaver(Checkpoints(Path(folder), ranks(), said.append), ranks(), CheckpointConfig(keep=1), {},
                               said.append)
            pieces = step.engine.state_shards()
            size = sum(piece.tensor.nbytes for parts in pieces.values() for piece in parts)
            prepare_s = device.seconds(lambda: saver.prepare(pieces))
            source = torch.randn(size // 4, device=device.device)
            target = torch.empty(size // 4, pin_memory=device.on_gpu)
            copy_s = statistics.median([device.seconds(partial(target.copy_, source, non_blocking=True))
                                        for _ in range(4)][1:])
            del source, target

            def steps() -> list[float]:
                return [device.seconds(step) for _ in range(2 if device.tiny else 6)]
            quiet, stalls, writing, meanwhile = steps(), list[float](), list[float](), list[float]()
            for number in (1, 2):
                stalls.append(saver.save(pieces, TrainingProgress(step=number)))
                meanwhile += steps()
                saver.wait()
                writing += [saved.details["seconds"] for saved in saver.ended() if saved.event == "checkpoint"]
            if len(writing) != 2:
                raise RuntimeError(f"not every save ended well: {said}")
        report("", gigabytes=size / 1e9, prepare_s=prepare_s, stall_s=min(stalls), copy_s=copy_s,
               stall_ratio=min(stalls) / copy_s, copy_gb_per_s=size / copy_s / 1e9,
               write_gb_per_s=size / min(writing) / 1e9, quiet_ms=1e3 * statistics.median(quiet),
               writing_ms=1e3 * statistics.median(meanwhile))

def compile_counts() -> Row:
    """What torch.compile has made since `Device.fresh`: graphs, breaks, recompilations, finds in inductor's cache."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is None or not compiled_graphs():
        return {"graphs": 0}
    seen: list[Any] = getattr(dynamo, "get_compilation_metrics", list)()
    return {"graphs": compiled_graphs(), "breaks": sum(dynamo.counters["graph_break"].values()),
            "recompilations": sum(1 for one in seen if getattr(one, "recompile_reason", None)),
            "cache_hits": int(dynamo.counters["inductor"]["fxgraph_cache_hit"])}
