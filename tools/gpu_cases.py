"""Training steps, checkpoints, decoding and profiles on one device, through the code that training uses."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from model.attention.backend import Documents, Where
from model.attention.choosing import choose
from model.config import ModelConfig
from model.generate import generate
from model.llama import Llama
from model.loss import Losses
from model.presets import PRESETS
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import CheckpointConfig, TrainConfig
from pipeline.config.tree import Config
from pipeline.data.sampling.batch import Batch, pack
from pipeline.parallel.context_parallel import gathered, places
from pipeline.parallel.grid import Grid, own
from pipeline.parallel.ranks import Ranks, start_ranks
from pipeline.records.checkpoints import TrainingProgress
from pipeline.training.async_saver import AsyncSaver
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.device_facts import compiled_graphs
from pipeline.training.engines.build import build_engine
from pipeline.training.guards import StepLimits
from tools import gpu_kernels
from tools.gpu_kernels import BACKENDS, Device, NotHereError, Report, head_losses

DOCUMENT_TOKENS = 1024
"""Mean length of the made-up documents."""


def shape(name: str, device: Device, layers: int | None) -> tuple[ModelConfig, int]:
    """A published model, and the sequence length to train it at; in the self-test a very small one.

    "8b" is Llama 3 8B with `layers` of its layers, by default as many as leave room for two sequences.
    """
    if device.tiny:
        return ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, vocab_size=512, context_length=256,
                           tied_embeddings=name != "8b"), 128
    if name != "8b":
        return PRESETS[f"llama3.2_{name}"].model_copy(update={"context_length": 8192}), 8192
    memory = torch.cuda.get_device_properties(device.device).total_memory if device.on_gpu else 0
    for count in ([layers] if layers else [16, 8, 4, 2]):
        config = PRESETS["llama3_8b"].model_copy(update={"layers": count})
        # 16 bytes for weights, gradients and moments; 2 GB a layer for activations of a sequence; the head.
        if 16 * config.parameter_count + 2e9 * count + 8e9 < 0.62 * memory:
            break
    return config, 8192


def begins(length: int, seed: int = 0) -> list[int]:
    """Where made-up documents start in a sequence, 0 first: lengths are spread evenly around the mean."""
    random, found = np.random.default_rng(seed), [0]
    mean = min(DOCUMENT_TOKENS, length // 4)
    while found[-1] < length:
        found.append(found[-1] + int(random.integers(mean // 2, 3 * mean // 2)))
    return found[:-1]


def batch(config: ModelConfig, length: int, sequences: int, seed: int) -> Batch:
    """Random tokens in packed documents."""
    random = np.random.default_rng(seed)
    return pack([(random.integers(0, config.vocab_size or 0, length + 1), np.array(begins(length, seed + row)))
                 for row in range(sequences)])


@torch.no_grad()
def fill(model: nn.Module, config: ModelConfig) -> None:
    """Weights of the usual sizes, drawn on the device; zeros would run faster than real ones."""
    for name, parameter in model.named_parameters():
        local = own(parameter)
        if name.endswith("norm.weight"):
            local.fill_(1)
        else:
            local.normal_(std=config.dim**-0.5 if name == "output.weight" else 0.02)


class OtherLosses(Losses):
    """One of the head's other implementations in the place of ours."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def total(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """As in Losses."""
        return self.function(hidden.flatten(0, 1), weight, labels.flatten())


class Bench:
    """All kinds of cases on one device. `run` is the way in."""

    def __init__(self, device: Device, folder: Path, layers: int | None) -> None:
        self.device, self.folder, self.layers = device, folder, layers
        self._ranks: Ranks | None = None

    def run(self, kind: str, options: dict[str, Any], report: Report) -> None:
        """Measure one case; every figure goes through `report`."""
        method = getattr(self, f"_{kind}")
        with self.device.compiling():
            self.device.fresh()
            method(report, **options)

    @property
    def ranks(self) -> Ranks:
        """A group of one, as training in a single process has it."""
        if self._ranks is None:
            self._ranks = start_ranks()
        return self._ranks

    def _matrix(self, report: Report) -> None:
        gpu_kernels.matrix(self.device, report)

    def _attention(self, report: Report, shape_name: str, packed: bool) -> None:
        config, length = shape(shape_name, self.device, self.layers)
        gpu_kernels.attention(self.device, report, config, begins(length), length, packed)

    def _share(self, report: Report, shape_name: str) -> None:
        """Attention as context parallelism leaves it to rank 0 of 2 and of 8, beside `_attention` of documents. Keys
        and values are there already: what gathering them costs only several devices show."""
        device, (config, length) = self.device, shape(shape_name, self.device, self.layers)
        starts = begins(length)
        lengths = (tuple(end - begin for begin, end in zip(starts, [*starts[1:], length], strict=True)),)
        backend = choose("auto", Where(device.device, torch.bfloat16, False, config.head_width, segmented=True)).backend
        for ranks in (2, 8):
            found, of_rank = gathered(lengths, ranks, 0), len(places(lengths, ranks)[0, 0])
            index = torch.from_numpy(found.index).to(device.device)
            q, k, v = (torch.randn(1, tokens, heads, config.head_width, device=device.device, dtype=torch.bfloat16,
                                   requires_grad=True) for tokens, heads in (
                (of_rank, config.heads), (length, config.kv_heads), (length, config.kv_heads)))
            numbers = torch.zeros(1, of_rank, dtype=torch.int32, device=device.device)
            prepared = backend.prepare(Documents(numbers, found.lengths, keys=found.keys), q.dtype)

            def run() -> torch.Tensor:
                return backend.attend(q, k.index_select(1, index), v.index_select(1, index), prepared)  # noqa: B023

            def both() -> None:
                run().sum().backward()
            report(f"documents, the share of one of {ranks} ranks, {backend.name}", forward_s=device.median(run),
                   both_s=device.median(both))

    def _head(self, report: Report, shape_name: str) -> None:
        config, length = shape(shape_name, self.device, self.layers)
        gpu_kernels.head(self.device, report, config, length)

    def _train(self, report: Report, **options: Any) -> None:
        with self._trainer(**options) as (step, facts):
            report("", **self._rate(step, facts))

    def _profile(self, report: Report, **options: Any) -> None:
        with self._trainer(**options) as (step, _):
            report("", **self._profiled(step))

    @contextmanager
    def _trainer(self, shape_name: str, documents: bool = True, backend: str | None = None,
                 checkpointing: str = "none", compiled: bool = True, sequences: int = 1, accumulation: int = 1,
                 loss: str | None = None, fp8: bool = False, reshard: str = "always",
                 library: str = "drover") -> Iterator[tuple[Callable[[], float], dict[str, Any]]]:
        """A training step to be called, and what is known of it; everything is let go afterwards."""
        config, length = shape(shape_name, self.device, self.layers)
        facts = {"shape": shape_name, "layers": config.layers, "parameters": config.parameter_count,
                 "tokens": sequences * accumulation * length, "precision": "fp8" if fp8 else "bf16", "backend": backend,
                 "flops_causal": config.flops_per_token(length, causal=True),
                 "flops_full": config.flops_per_token(length, causal=False)}
        with ExitStack() as stack:
            if backend:
                stack.enter_context(sdpa_kernel(BACKENDS[backend]))
            if library == "transformers":
                yield transformers_step(config, length, sequences, compiled, self.device), facts
                return
            if fp8:
                import_module("torchao.float8")  # where it is absent, the row says "missing", not "failed"
            engine = self._engine(config, length, sequences, accumulation,
                                  {"activation_checkpointing": checkpointing, "compile": compiled,
                                   "precision": facts["precision"], "fp8_recipe": "tensorwise"}, reshard)
            if loss:
                engine.model.losses = OtherLosses(head_losses(self.device)[loss])
            if not documents:
                engine.across_documents = True
            whole = batch(config, length, sequences * accumulation, seed=0)
            if not documents:
                whole = pack([(row.numpy(), np.array([0])) for row in torch.cat(
                    [whole.tokens, whole.tokens[:, :1]], dim=1)])

            def step() -> float:
                result = engine.step(whole.split(sequences), accumulation, whole.targets, 1e-5, StepLimits())
                if not result.applied:  # the limits leave out what is NaN, and nothing else
                    raise ArithmeticError(f"the step gave {result}")
                return float(result.loss)
            yield step, facts

    def _engine(self, config: ModelConfig, length: int, sequences: int, accumulation: int, train: dict[str, Any],
                reshard: str = "always") -> Any:
        settings = Config(model=config, parallel=ParallelConfig.model_validate({"reshard": reshard}),
                          train=TrainConfig(**{"precision": "bf16", **train}, sequence_length=length,
                                            micro_batch=sequences, batch_tokens=sequences * accumulation * length))
        engine: Any = build_engine(settings, config, Grid(self.ranks, settings.parallel), torch.bfloat16, accumulation,
                                   initial=None)
        fill(engine.model, config)
        return engine

    def _rate(self, step: Callable[[], float], facts: dict[str, Any]) -> dict[str, Any]:
        """Seconds of steps after the first three, and what compiling took and made."""
        device, tiny = self.device, self.device.tiny
        first = device.seconds(step)
        for _ in range(0 if tiny else 2):
            step()
        smi, times, loss = device.sample(), list[float](), 0.0
        while len(times) < (2 if tiny else 5) or (sum(times) < 3 and len(times) < (2 if tiny else 12)):
            def timed() -> None:
                nonlocal loss
                loss = step()
            times.append(device.seconds(timed))
        return {**facts, "first_step_s": first, "step_s": sorted(times), "loss": loss, "memory_gb": device.peak_gb(),
                **compile_counts(), **smi()}

    def _profiled(self, step: Callable[[], float]) -> dict[str, Any]:
        """Where the device's time goes; the kernels that take most are written to profile.txt."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile
        for _ in range(1 if self.device.tiny else 3):
            step()
        plain_s = self.device.seconds(step)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.on_gpu else [])]
        with profile(activities=activities) as found:
            self.device.seconds(step)
        rows: list[tuple[float, int, str]] = []
        for event in found.key_averages():
            on_device = event.device_type == DeviceType.CUDA
            if on_device != self.device.on_gpu or getattr(event, "is_user_annotation", False) or re.match(
                    r"FSDP::|ProfilerStep|Optimizer\.|## Call|Torch-Compiled", event.key):
                continue
            spent = event.self_device_time_total if on_device else event.self_cpu_time_total
            rows.append((float(spent), int(event.count), str(event.key)))
        if not rows:
            raise NotHereError("the profiler saw no kernels (no access to the GPU's counters?)")
        rows.sort(reverse=True)
        busy = sum(spent for spent, _, _ in rows)
        groups: Counter[str] = Counter()
        for spent, _, name in rows:
            groups[_group(name)] += int(spent)
        shares = {name: round(spent / busy, 4) for name, spent in groups.most_common()}
        lines = [f"one step: {plain_s * 1e3:.1f} ms undisturbed, kernels {busy / 1e3:.1f} ms",
                 *(f"  {share:6.1%}  {name}" for name, share in shares.items()), "",
                 f"{'ms':>10} {'share':>7} {'calls':>6}  kernel",
                 *(f"{spent / 1e3:10.2f} {spent / busy:7.1%} {count:6}  {name[:160]}"
                   for spent, count, name in rows[:25])]
        (self.folder / "profile.txt").write_text("\n".join(lines) + "\n")
        return {"plain_s": plain_s, "busy_s": busy / 1e6, "shares": shares, "top": rows[0][2][:120]}

    def _checkpoint(self, report: Report, shape_name: str, layers: int) -> None:
        """What saving costs: the copy that stalls the loop, a plain copy of as many bytes, writing, steps meanwhile."""
        device, (config, length) = self.device, shape(shape_name, self.device, self.layers)
        config = config.model_copy(update={"layers": min(layers, config.layers)})
        engine = self._engine(config, length, 1, 1, {"compile": False})
        data = batch(config, length, 1, seed=0)

        def step() -> Any:
            return engine.step(iter([data]), 1, data.targets, 1e-5, StepLimits())
        step()
        with tempfile.TemporaryDirectory(prefix="drover-checkpoint-") as folder:
            said, events = list[str](), list[dict[str, Any]]()
            checkpoints = Checkpoints(Path(folder), self.ranks, said.append)
            saver = AsyncSaver(checkpoints, self.ranks, CheckpointConfig(keep=1), {}, said.append,
                               lambda name, **details: events.append(details))
            pieces = engine.state_shards()
            size = sum(piece.tensor.nbytes for parts in pieces.values() for piece in parts)
            prepare_s = device.seconds(lambda: saver.prepare(pieces))
            source = torch.randn(size // 4, device=device.device)
            target = torch.empty(size // 4, pin_memory=device.on_gpu)
            copies = [device.seconds(partial(target.copy_, source, non_blocking=True)) for _ in range(4)][1:]
            del source, target
            quiet = [device.seconds(step) for _ in range(2 if device.tiny else 6)]
            meanwhile = []
            for number in (1, 2):
                saver.save(pieces, TrainingProgress(step=number))
                meanwhile += [device.seconds(step) for _ in range(2 if device.tiny else 6)]
                saver.wait()
            stalls, writing = ([event[name] for event in events if name in event] for name in ("stall_s", "seconds"))
            if len(writing) != 2:
                raise RuntimeError(f"not every save ended well: {said}")
        plain_s, stall_s = sorted(copies)[1], min(stalls)
        report("", gigabytes=size / 1e9, prepare_s=prepare_s, stall_s=stall_s, stalls_s=stalls, copy_s=plain_s,
               stall_ratio=stall_s / plain_s, copy_gb_per_s=size / plain_s / 1e9, write_s=writing,
               write_gb_per_s=size / min(writing) / 1e9, step_quiet_s=sorted(quiet)[len(quiet) // 2],
               step_writing_s=sorted(meanwhile)[len(meanwhile) // 2])

    def _decode(self, report: Report, shape_name: str) -> None:
        """Tokens per second of `model.generate` for one prompt: a plain model in bf16, and training's own."""
        config, _ = shape(shape_name, self.device, self.layers)
        prompt, count = list(range(1, 9 if self.device.tiny else 129)), 4 if self.device.tiny else 65

        def rate(model: Any) -> dict[str, Any]:
            def tokens(number: int) -> Callable[[], Any]:
                return lambda: generate(model, [prompt], number, temperature=0, top_p=1, seed=0, stop_ids=())
            tokens(2)()
            first = self.device.seconds(tokens(1))
            whole = self.device.seconds(tokens(count))
            return {"prefill_s": first, "decode_tokens_per_s": (count - 1) / (whole - first) if whole > first
                    else count / whole, "weight_gb": 2e-9 * config.matmul_parameter_count}
        with torch.device("meta"):
            model = Llama(config).to(torch.bfloat16)
        model.to_empty(device=self.device.device)
        fill(model, config)
        gpu_kernels.attempt(self.device, report, "plain model", partial(rate, model))
        del model
        self.device.fresh()
        gpu_kernels.attempt(self.device, report, "training's model (FSDP2, one rank)", lambda: rate(
            self._engine(config, config.context_length, 1, 1, {"compile": False}).model))


def transformers_step(config: ModelConfig, length: int, sequences: int, compiled: bool,
                      device: Device) -> Callable[[], float]:
    """The same shape as transformers builds it: float32 weights, bf16 by autocast, SDPA without documents."""
    from transformers import LlamaConfig, LlamaForCausalLM
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.dim, "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "max_position_embeddings": length,
        "tie_word_embeddings": config.tied_embeddings, "attn_implementation": "sdpa", "use_cache": False}
    with device.device:
        model: Any = LlamaForCausalLM(LlamaConfig(**settings)).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward, data = torch.compile(model) if compiled else model, batch(config, length, sequences, seed=0)
    tokens, labels = data.tokens.to(device.device), data.labels.to(device.device)

    def step() -> float:
        with torch.autocast(device.device.type, torch.bfloat16):
            logits = forward(input_ids=tokens).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
    return step


def compile_counts() -> dict[str, Any]:
    """What torch.compile has made since `Device.fresh`: graphs, breaks, recompilations, finds in inductor's cache."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is None or not compiled_graphs():
        return {"graphs": 0}
    seen: list[Any] = getattr(dynamo, "get_compilation_metrics", list)()
    inductor = dynamo.counters["inductor"]
    return {"graphs": compiled_graphs(), "breaks": sum(dynamo.counters["graph_break"].values()),
            "recompilations": sum(1 for one in seen if getattr(one, "recompile_reason", None)),
            "cache_hits": int(inductor["fxgraph_cache_hit"]), "cache_misses": int(inductor["fxgraph_cache_miss"])}


def _group(kernel: str) -> str:
    """A kernel's sort, by its name."""
    sorts = {"attention": r"flash|fmha|sdpa|attention|attn",
             "matrix products": r"gemm|nvjet|cutlass|cublas|::mm$|addmm",
             "optimizer": r"adam", "FSDP's copies": r"split_with_sizes_copy|chunk_cat|nccl|fsdp::",
             "fused by the compiler": r"^triton_", "copies": r"memcpy|memset|copy"}
    return next((sort for sort, pattern in sorts.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")
