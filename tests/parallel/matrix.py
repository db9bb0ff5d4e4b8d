"""Every way of spreading a model, run on the same seed and data and compared: `make matrix` writes docs/matrix.md.

`python -m tests.parallel.matrix --store` keeps the losses that later versions are held to.

Each case is a torchrun of train_steps.py on gloo. A case's difference is the largest relative difference of any
step's loss or gradient norm from those of its reference.
"""

import functools
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = REPOSITORY / "docs/matrix.md"
STORED = Path(__file__).with_name("reference_losses.json")


@dataclass(frozen=True)
class Case:
    """One way to run. bound: the largest difference from `reference` that is allowed; 0 means equal to the last bit."""

    name: str
    reference: str | None = None
    bound: float = 1e-12
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


def fsdp2(name: str, ranks: int, micro_batch: int, **parallel: Any) -> Case:
    """A layout in float64 over 50 steps."""
    return Case(name, "one process, float64", 1e-12, ranks, {"steps": 50, "micro_batch": micro_batch,
                                                             "parallel": parallel})


def single(name: str, reference: str | None = None, bound: float = 0.0, micro_batch: int = 8, **settings: Any) -> Case:
    """One process in float32 over 20 steps."""
    return Case(name, reference, bound, 1, {"precision": "fp32", "steps": 20, "micro_batch": micro_batch, **settings})


def deepspeed(name: str, micro_batch: int = 4, bound: float = 1e-5, **parallel: Any) -> Case:
    """A ZeRO stage in float32 over 20 steps."""
    return Case(name, "one process, float32", bound, 2,
                {"precision": "fp32", "steps": 20, "micro_batch": micro_batch,
                 "parallel": {"engine": "deepspeed", **parallel}})


def bf16(name: str, **parallel: Any) -> Case:
    """A layout in bfloat16 over 20 steps; other sums round otherwise, by up to 1/256 each."""
    return Case(name, "one process, bf16", 5e-3, 2, {"precision": "bf16", "steps": 20, "micro_batch": 4,
                                                    "parallel": parallel})


CASES = {case.name: case for case in (
    Case("one process, float64", settings={"steps": 50}),
    fsdp2("accumulation 4", 1, 2),
    fsdp2("FSDP2 x 2", 2, 4),
    fsdp2("FSDP2 x 2, accumulation 4", 2, 1),
    fsdp2("FSDP2 x 2, weights kept, accumulation 2", 2, 2, reshard="never"),
    fsdp2("FSDP2 x 4", 4, 2),
    fsdp2("HSDP 2 x 2", 4, 2, dp_replicate=2),
    fsdp2("HSDP 2 x 2, accumulation 2", 4, 1, dp_replicate=2),
    fsdp2("tensor parallel 2", 2, 8, tp=2),
    fsdp2("FSDP2 x tensor parallel 2 x 2", 4, 4, tp=2),
    fsdp2("copies x tensor parallel 2 x 2", 4, 4, tp=2, dp_replicate=2),
    Case("one process, tied, float64", settings={"steps": 50, "tied": True}),
    Case("tensor parallel 2, tied", "one process, tied, float64", 1e-12, 2,
         {"steps": 50, "tied": True, "parallel": {"tp": 2}}),
    single("one process, float32"),
    single("all activations recomputed", "one process, float32", train={"activation_checkpointing": "full"}),
    single("selected activations kept", "one process, float32", train={"activation_checkpointing": "selective"}),
    single("every second block recomputed", "one process, float32",
           train={"activation_checkpointing": "full", "recomputed_blocks": 2}),
    single("compiled blocks", "one process, float32", 1e-4, train={"compile": True}),
    Case("FSDP2 x 2, float32", "one process, float32", 1e-5, 2,
         {"precision": "fp32", "steps": 20, "micro_batch": 4}),
    deepspeed("DeepSpeed ZeRO 1 x 2", zero_stage=1),
    deepspeed("DeepSpeed ZeRO 2 x 2", zero_stage=2),
    deepspeed("DeepSpeed ZeRO 2 x 2, accumulation 2", 2, zero_stage=2),
    deepspeed("DeepSpeed ZeRO 3 x 2", zero_stage=3),
    deepspeed("DeepSpeed ZeRO 3 x 2, accumulation 2", 2, zero_stage=3),
    deepspeed("DeepSpeed ZeRO 1 x 2, moments in host memory", zero_stage=1, offload="optimizer"),
    deepspeed("DeepSpeed ZeRO 2 x 2, moments in host memory", zero_stage=2, offload="optimizer"),
    deepspeed("DeepSpeed ZeRO 3 x 2, moments in host memory", zero_stage=3, offload="optimizer"),
    deepspeed("DeepSpeed ZeRO 3 x 2, weights in host memory", 2, zero_stage=3, offload="params"),
    Case("one process, bf16", "one process, float32", 2e-2, 1, {"precision": "bf16", "steps": 20}),
    bf16("FSDP2 x 2, bf16"),
    bf16("DeepSpeed ZeRO 1 x 2, bf16", engine="deepspeed", zero_stage=1),
    bf16("DeepSpeed ZeRO 2 x 2, bf16", engine="deepspeed", zero_stage=2),
    bf16("DeepSpeed ZeRO 3 x 2, bf16", engine="deepspeed", zero_stage=3),
)}


@functools.cache
def run(name: str) -> dict[str, Any]:
    """What a case gave: `results` as rows of (loss, gradient norm), `initial` as a hash of the first weights."""
    case = CASES[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}",
               "tests/parallel/train_steps.py", json.dumps(case.settings)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False,
                            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
                                 "CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, f"{name}\n{result.stdout}\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])


def results(name: str) -> torch.Tensor:
    """(steps, 2) float64: loss and gradient norm of each step."""
    return torch.tensor(run(name)["results"], dtype=torch.float64)


def difference(name: str) -> float:
    """The largest relative difference of a case from its reference; 0 is equal to the last bit."""
    reference = CASES[name].reference
    assert reference is not None
    expected, found = results(reference), results(name)
    return float(((found - expected).abs() / expected.abs()).max())


def machine() -> str:
    """What the last bits of a float depend on."""
    return f"torch {torch.__version__.split('+')[0]}, {torch.backends.cpu.get_cpu_capability()}"


def table() -> str:
    """The matrix with measured differences, as Markdown."""
    lines = ["# The matrix: every engine computes the same", "",
             "Made by `make matrix`; `tests/parallel/test_matrix.py` runs the same cases and holds each to its bound.",
             "A difference is the largest relative one in any step's loss or gradient norm: 50 steps in float64, 20 in",
             f"float32 and bf16, a decoder of three blocks on packed documents, {machine()}, gloo on",
             f"{platform.machine()}.", "",
             "| case | ranks | steps | compared with | difference | bound |", "|---|---|---|---|---|---|"]
    for case in CASES.values():
        if case.reference is not None:
            found = difference(case.name)
            lines.append(f"| {case.name} | {case.ranks} | {case.settings['steps']} | {case.reference} | "
                         f"{f'{found:.1e}' if found else 'none: bit-equal'} | "
                         f"{f'{case.bound:.0e}' if case.bound else 'bit-equal'} |")
    return "\n".join(lines) + "\n"


def store() -> None:
    """Keep the single process's losses as what later versions must compute, to the last bit."""
    STORED.write_text(json.dumps({"machine": machine(), "results": run("one process, float64")["results"]}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--store"]:
        store()
    else:
        TABLE.write_text(table(), encoding="utf-8")
        print(TABLE.read_text(encoding="utf-8"))
