"""One device, and what it does at its best: matrix products, copies, one layer's attention, the head with its loss.

Everything that differs between a GPU and the CPU of the self-test is in `Device`.
"""

from __future__ import annotations

import gc
import inspect
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import loss as ours
from model.attention.sdpa import dense_mask
from model.config import ModelConfig
from model.loss import Passes, cross_entropy_sum
from pipeline.training.device_facts import memory_mb, peak_flops

Report = Callable[..., None]
"""Called as report(name, **figures) for each thing measured."""

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
UNDER_LOAD = ("clocks.sm", "power.draw", "temperature.gpu")
"""What is asked of nvidia-smi while steps run."""


class NotHereError(Exception):
    """This device or version of a library cannot do it: a fact, not a fault."""


class Device:
    """The GPU, or in the self-test the CPU: `tiny` then says that sizes and repetitions are."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.on_gpu = tiny, torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        self.peak = peak_flops(self.device)

    def facts(self) -> dict[str, Any]:
        """Names, versions and sizes."""
        found: dict[str, Any] = {"device": self.device.type, "torch": torch.__version__, "cuda": torch.version.cuda,
                                 "python": sys.version.split()[0], "datasheet_tflops": self.peak and self.peak / 1e12}
        for name in ("triton", "transformers", "torchao"):
            found[name] = _version(name)
        if self.on_gpu:
            about = torch.cuda.get_device_properties(self.device)
            found.update(card=about.name, memory_gb=round(about.total_memory / 1e9, 1),
                         capability=f"{about.major}.{about.minor}", processors=about.multi_processor_count,
                         cudnn=torch.backends.cudnn.version(), nccl=str(torch.cuda.nccl.version()),
                         **self.sample(("driver_version", "clocks.max.sm", "power.limit", "clocks.sm"))())
        return found

    def synchronize(self) -> None:
        """Until all that was asked for is done."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def fresh(self) -> None:
        """Forget compiled code and free memory: what was measured before must not weigh on what comes."""
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            dynamo.reset()
            dynamo.utils.counters.clear()
            getattr(dynamo.utils, "clear_compilation_metrics", lambda: None)()
        gc.collect()
        if self.on_gpu:
            self.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def left_share(self) -> float:
        """The share of the device's memory that is still in use; 0 on a CPU."""
        whole = torch.cuda.get_device_properties(self.device).total_memory if self.on_gpu else 1
        return torch.cuda.memory_allocated(self.device) / whole if self.on_gpu else 0.0

    def peak_gb(self) -> float:
        """Most memory since `fresh` (on a CPU: of the process)."""
        return round(memory_mb(self.device) / 1e3, 3)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Of one call, with all the device's work."""
        self.synchronize()
        began = time.perf_counter()
        action()
        self.synchronize()
        return time.perf_counter() - began

    def median(self, action: Callable[[], Any], budget_s: float = 0.4) -> float:
        """Median seconds of a short piece of work, after two calls to warm up; very short ones are timed in groups."""
        self.seconds(action)
        once = self.seconds(action)
        group = 1 if self.tiny else max(1, min(50, int(0.005 / max(once, 1e-6))))
        rounds = 2 if self.tiny else max(5, min(20, int(budget_s / max(once * group, 1e-6))))
        return statistics.median(self.seconds(lambda: [action() for _ in range(group)]) / group
                                 for _ in range(rounds))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Where torch.compile is called. The self-test traces and splits as on a GPU, and generates no code."""
        if self.on_gpu:
            yield
            return
        with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
            yield

    def sample(self, fields: tuple[str, ...] = UNDER_LOAD) -> Callable[[], dict[str, str]]:
        """Ask nvidia-smi now; the answer is waited for later. Empty where the program is missing or fails."""
        if not self.on_gpu or shutil.which("nvidia-smi") is None:
            return dict
        query = subprocess.Popen(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"],
                                 text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

        def answer() -> dict[str, str]:
            try:
                values = query.communicate(timeout=10)[0].strip().split(", ")
            except subprocess.TimeoutExpired:
                query.kill()
                return {}
            return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}
        return answer


def classify(error: BaseException, on_gpu: bool) -> tuple[str, str]:
    """(status, what to say) of a failure: missing, not here, oom or failed."""
    text = f"{type(error).__name__}: {error}"
    short = " ".join(text.split())[:300]
    if isinstance(error, ImportError):
        return "missing", short
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return "oom", short
    unsupported = isinstance(error, NotHereError) or "No available kernel" in text or "No viable backend" in text
    if unsupported or (not on_gpu and isinstance(error, NotImplementedError)):
        return "not here", short
    return "failed", short


def attempt(device: Device, report: Report, name: str, action: Callable[[], dict[str, Any]]) -> None:
    """Report what `action` finds, or why it could not."""
    try:
        report(name, **action())
    except Exception as error:  # noqa: BLE001 - each measurement stands alone; the row says what happened
        status, note = classify(error, device.on_gpu)
        report(name, status=status, note=note)


def matrix(device: Device, report: Report) -> None:
    """Products of bf16 matrices at shapes that occur in Llamas, one in fp8, and a copy within the device's memory."""
    shapes = [(8192, 8192, 8192), (16384, 8192, 8192), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 4096, 4096),
              (2048, 4096, 128256), (8192, 2048, 8192), (4096, 4096, 4096)]
    for rows, inner, columns in [(64, 64, 64)] if device.tiny else shapes:
        attempt(device, report, f"bf16 {rows} x {inner} x {columns}", partial(_product, device, rows, inner, columns))
    attempt(device, report, "fp8 product", partial(_fp8_product, device, 64 if device.tiny else 8192))
    attempt(device, report, "copy", partial(_copy, device, 1 << (16 if device.tiny else 30)))
    device.fresh()


def _product(device: Device, rows: int, inner: int, columns: int) -> dict[str, Any]:
    left = torch.randn(rows, inner, device=device.device, dtype=torch.bfloat16)
    right = torch.randn(columns, inner, device=device.device, dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device=device.device, dtype=torch.bfloat16)
    seconds = device.median(lambda: torch.mm(left, right.t(), out=out))
    return {"seconds_each": seconds, "tflops": 2 * rows * inner * columns / seconds / 1e12, "precision": "bf16"}


def _fp8_product(device: Device, size: int) -> dict[str, Any]:
    if device.on_gpu and torch.cuda.get_device_capability(device.device) < (8, 9):
        raise NotHereError("fp8 products need compute capability 8.9")
    left, right = (torch.randn(size, size, device=device.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device.device)
    try:
        seconds = device.median(lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one,
                                                         out_dtype=torch.bfloat16, use_fast_accum=device.on_gpu))
    except RuntimeError as error:
        if device.on_gpu:
            raise
        raise NotHereError(str(error)) from error
    return {"seconds_each": seconds, "tflops": 2 * size**3 / seconds / 1e12, "precision": "fp8"}


def _copy(device: Device, count: int) -> dict[str, Any]:
    source = torch.randn(count // 2, device=device.device)  # float32: 2 count bytes
    target = torch.empty_like(source)
    seconds = device.median(lambda: target.copy_(source))
    return {"seconds_each": seconds, "gb_per_s": 2 * source.nbytes / seconds / 1e9}


def attention(device: Device, report: Report, config: ModelConfig, begins: list[int], length: int,
              packed: bool) -> None:
    """One layer's attention, each way of computing it: forward, and forward with backward, for one sequence.

    begins: where documents start, the first at 0. packed: attention stays inside documents. TFLOP/s are nominal: half
    of full attention for causal and for documents alike, whatever a kernel really computes.
    """
    heads, groups, width = config.heads, config.kv_heads, config.head_width
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, count, width, device=device.device, dtype=torch.bfloat16, requires_grad=True)
               for count in (heads, groups, groups))
    upstream = torch.randn_like(q)
    flops = 6.0 * heads * width * length * length  # as ModelConfig.flops_per_token counts a layer
    reference: list[Tensor] = []  # what the first way gave: the others must agree

    def measure(run: Callable[[], Tensor], backward: bool = True) -> dict[str, Any]:
        with torch.no_grad():
            out = run().float()
            reference.append(out)
            found = {"forward_s": device.median(run),
                     "difference": float((out - reference[0]).norm() / reference[0].norm())}
        if backward:
            found["both_s"] = device.median(lambda: run().backward(upstream))
            found["tflops"] = flops / found["both_s"] / 1e12
            q.grad = k.grad = v.grad = None
        return found

    def sdpa(backend: str | None = None, mask: Tensor | None = None, repeat: bool = False) -> Tensor:
        queries, keys, values = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if repeat:
            keys, values = (part.repeat_interleave(heads // groups, dim=1) for part in (keys, values))
        with sdpa_kernel(BACKENDS[backend]) if backend else nullcontext():
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None,
                                                  enable_gqa=not repeat).transpose(1, 2)

    def each(kind: str, **ways: Callable[[], Tensor]) -> None:
        for name, run in ways.items():
            attempt(device, report, f"{kind}, {name.replace('_', ' ')}", partial(measure, run))

    if not packed:
        each("causal", the_default=sdpa, **{name: partial(sdpa, name) for name in ("flash", "cudnn", "efficient")},
             efficient_with_heads_repeated=partial(sdpa, "efficient", repeat=True))
        _other_flash(device, report, lambda: measure(partial(sdpa, "flash")))
        return
    marks = torch.zeros(1, length, dtype=torch.int32)
    marks[0, begins[1:]] = 1
    documents = marks.cumsum(1, dtype=torch.int32).to(device.device)
    make_mask = partial(dense_mask, length, 0, documents, device.device, torch.bfloat16)
    attempt(device, report, "documents, making the dense mask", lambda: {"forward_s": device.median(make_mask)})
    mask = make_mask()
    each("documents, dense mask", the_default_with_heads_repeated=partial(sdpa, None, mask, True),
         cudnn=partial(sdpa, "cudnn", mask), cudnn_with_heads_repeated=partial(sdpa, "cudnn", mask, True))
    attempt(device, report, "documents, varlen",
            lambda: measure(_varlen(device, q, k, v, begins, length, heads // groups)))
    attempt(device, report, "documents, flex",
            lambda: measure(_flex(device, report, q, k, v, documents), backward=device.on_gpu))


def _varlen(device: Device, q: Tensor, k: Tensor, v: Tensor, begins: list[int], length: int,
            group: int) -> Callable[[], Tensor]:
    from torch.nn.attention.varlen import varlen_attn
    known = inspect.signature(varlen_attn).parameters  # torch 2.10 to 2.13 each have their own
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"], group = True, 1
    edges = torch.tensor([*begins, length], dtype=torch.int32, device=device.device)
    longest = int(edges.diff().max())

    def run() -> Tensor:
        keys, values = (part[0].repeat_interleave(group, dim=1) if group > 1 else part[0] for part in (k, v))
        out: Any = varlen_attn(q[0], keys, values, edges, edges, longest, longest, **options)
        whole: Tensor = out.unsqueeze(0)
        return whole
    if not device.on_gpu:
        try:
            run()
        except (RuntimeError, NotImplementedError) as error:
            raise NotHereError(f"varlen_attn has no kernel for CPUs: {error}") from error
    return run


def _flex(device: Device, report: Report, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])
    if not device.on_gpu:  # there it has no backward pass
        q, k, v = q.detach(), k.detach(), v.detach()
    length = q.shape[1]
    make = partial(create_block_mask, seen, 1, None, length, length, device=str(device.device))
    attempt(device, report, "documents, making flex's block mask", lambda: {"forward_s": device.median(make)})
    blocks = make()
    run: Any = torch.compile(flex_attention, dynamic=False) if device.on_gpu else flex_attention

    def attend() -> Tensor:
        queries, keys, values = (part.transpose(1, 2) for part in (q, k, v))
        out: Tensor = run(queries, keys, values, block_mask=blocks, enable_gqa=True).transpose(1, 2)
        return out
    return attend


def _other_flash(device: Device, report: Report, action: Callable[[], dict[str, Any]]) -> None:
    """Newer flash kernels that torch can be told to use, where their packages are installed."""
    import torch.nn.attention as kernels
    for name in getattr(kernels, "list_flash_attention_impls", list)():
        def run(name: str = name) -> dict[str, Any]:
            kernels.activate_flash_attention_impl(name)
            try:
                return action()
            finally:
                kernels.restore_flash_attention_impl()
        attempt(device, report, f"causal, flash by {name}", run)


def head(device: Device, report: Report, config: ModelConfig, rows: int) -> None:
    """Output matrix and cross-entropy, forward and backward, for `rows` tokens: ours by chunk, and torch's."""
    reference: list[float] = []  # the norm of the weight's gradient, which the others must agree with

    for name, loss in head_losses(device).items():
        def run(loss: Callable[..., Tensor] = loss) -> dict[str, Any]:
            device.fresh()
            torch.manual_seed(0)
            hidden = torch.randn(rows, config.dim, device=device.device, dtype=torch.bfloat16, requires_grad=True)
            weight = (torch.randn(config.vocab_size or 0, config.dim, device=device.device) / config.dim**0.5).to(
                torch.bfloat16).requires_grad_()
            labels = torch.randint(0, config.vocab_size or 0, (rows,), device=device.device)

            def step() -> None:
                hidden.grad = weight.grad = None
                (loss(hidden, weight, labels) / rows).backward()
            both_s, peak_gb = device.median(step), device.peak_gb()
            assert weight.grad is not None
            reference.append(float(weight.grad.float().norm()))
            return {"both_s": both_s, "tflops": 6.0 * rows * weight.numel() / both_s / 1e12, "memory_gb": peak_gb,
                    "difference": abs(reference[-1] / reference[0] - 1)}
        attempt(device, report, name, run)
    device.fresh()


def head_losses(device: Device) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Sums of cross-entropies from (hidden, weight, labels), by name."""
    chunks = (16, 64) if device.tiny else (1024, 2048, 4096, 8192)
    return {**{f"ours, chunks of {chunk}": partial(cross_entropy_sum, chunk_tokens=chunk) for chunk in chunks},
            "ours, compiled": partial(cross_entropy_sum, passes=Passes.compiled()),
            "ours, sums by addmm": _ours_summing_in_products,
            "linear_cross_entropy": _linear_cross_entropy, "plain": _plain, "plain, compiled": _compiled_plain}


def _ours_summing_in_products(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The weight's gradient is added up inside the product, in float32: no product in bf16 beside it."""
    def add(total: Tensor, gradient: Tensor, x: Tensor) -> None:
        torch.ops.aten.addmm.dtype_out(total, gradient.T, x, total.dtype, out=total)
    with mock.patch.object(ours, "add_weight_gradient", add):
        return cross_entropy_sum(hidden, weight, labels)


def _linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    function = getattr(F, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        raise NotHereError(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    loss: Tensor = function(hidden, weight, labels, reduction="sum", ignore_index=-100, options=options())
    return loss


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum", ignore_index=-100)


def _compiled_plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = torch.compile(_plain)(hidden, weight, labels)
    return loss


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version
    try:
        return version(package)
    except PackageNotFoundError:
        return None
