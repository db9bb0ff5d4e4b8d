"""Every way of spreading a model, run on the same seed and data and compared; `matrix_table` shows it.

A case's difference is the largest relative difference from its reference in any step's loss or gradient norm, or in any
parameter's gradient: the norm of the difference over the norm, of whole tensors, in the first step and the last.
"""

import functools
import importlib.util
import itertools
import os
import shutil
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.model.varlen_on_cpu import NAME
from tests.parallel.crossing import every, pairwise
from tests.parallel.groups import REPOSITORY, run_case
from tests.tiny_models import DESCENDANT

STORED = REPOSITORY / "tests/parallel/reference_losses.json"


FOUR = {"layers": 4}
INTERLEAVED = {"pp_schedule": "interleaved"}
ZBV = {"pp_schedule": "zbv", "reshard": "never"}


@dataclass(frozen=True)
class Case:
    """One way to run. bound: the largest difference from `reference` that is allowed; 0 means equal to the last bit.
    settings: of `train_steps`. looser: how much more a single gradient may differ, where rounding shows: a norm and a
    loss are sums over all."""

    name: str
    reference: str | None = None
    bound: float = 1e-12
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    looser: float = 1.0

    def allows(self, what: str) -> float:
        """The bound of `loss and norm`, or of a parameter's gradient."""
        return self.bound if what == "loss and norm" else self.bound * self.looser


def fsdp2(name: str, ranks: int, accumulation: int = 1, **parallel: Any) -> Case:
    """A layout in float64 over 10 steps."""
    return Case(name, "one process, float64", 1e-12, ranks,
                {"steps": 10, "accumulation": accumulation, "parallel": parallel})


def checkpointed(name: str, **train: Any) -> Case:
    """A way of activation checkpointing in float32 over 10 steps: equal to the last bit."""
    return Case(name, "one process, float32", 0.0, 1, {"precision": "fp32", "steps": 10, "train": train})


def deepspeed(name: str, accumulation: int = 1, **parallel: Any) -> Case:
    """A ZeRO stage in float32 over 10 steps."""
    return Case(name, "one process, float32", 1e-5, 2,
                {"precision": "fp32", "steps": 10, "accumulation": accumulation,
                 "parallel": {"engine": "deepspeed", **parallel}}, looser=10)


def pipelined(name: str, ranks: int, accumulation: int, backend: str | None = None, tied: bool = False,
              train: dict[str, Any] | None = None, **parallel: Any) -> Case:
    """A pipeline in float64 over 10 steps, on a model of four layers."""
    muon = (train or {}).get("optimizer") == "muon"
    options = f"{', tied' * tied}{', Muon' * muon}"
    return Case(name + ", Muon" * muon, f"one process, 4 layers{options}", 1e-12, ranks, {
        "steps": 10, "shape": FOUR, "accumulation": accumulation, "backend": backend, "tied": tied,
        "train": train or {}, "parallel": {"pp": 2, **parallel}})


def context(name: str, ranks: int, reference: str = "one process, float64", cp: int = 2, **settings: Any) -> Case:
    """Sequences split over ranks, in float64 over 10 steps."""
    parallel = {"cp": cp, **settings.pop("parallel", {})}
    return Case(name, reference, 1e-12, ranks, {"steps": 10, **settings, "parallel": parallel})


def muon(name: str, ranks: int, accumulation: int = 1, **parallel: Any) -> Case:
    """A layout in float64 over 10 steps, with Muon in AdamW's place."""
    return Case(f"{name}, Muon", "one process, Muon", 1e-12, ranks,
                {"steps": 10, "accumulation": accumulation, "parallel": parallel, "train": {"optimizer": "muon"}})


def z_loss(name: str, ranks: int, **settings: Any) -> Case:
    """A layout with a z-loss that weighs as much as the loss itself."""
    return Case(f"{name}, z-loss", "one process, z-loss", 1e-12, ranks,
                {"steps": 10, "train": {"z_loss": 0.03}, **settings})


def descendant(name: str, ranks: int, **settings: Any) -> Case:
    """A layout in float64 over 10 steps."""
    return Case(f"{name}, QK-norm and windows", "one process, QK-norm and windows", 1e-12, ranks,
                {"steps": 10, "shape": DESCENDANT, **settings})


def bf16(name: str, ranks: int = 2, steps: int = 10, **settings: Any) -> Case:
    """In bfloat16: other sums round otherwise, by up to 1/256 each."""
    return Case(name, "one process, bf16", 5e-3, ranks, {"precision": "bf16", "steps": steps, **settings}, looser=10)


def fp8(name: str, reference: str, bound: float, ranks: int = 1, **settings: Any) -> Case:
    """In fp8, where tokens of a micro-batch share a scale: what splits them otherwise, or adds otherwise in bfloat16,
    rounds otherwise, by up to 1/16 each. Clipping multiplies by a norm in float32, of other sums."""
    return Case(f"{name}, fp8", reference, bound, ranks, {"precision": "fp8", "steps": 10, **settings}, looser=10)


LAYOUTS = [
    Case("one process, float64", settings={"steps": 10}),
    Case("one process, 50 steps", settings={"steps": 50}),
    fsdp2("accumulation 4", 1, 4),
    fsdp2("FSDP2 x 2", 2),
    fsdp2("FSDP2 x 2, accumulation 4", 2, 4),
    fsdp2("FSDP2 x 2, weights kept, accumulation 2", 2, 2, reshard="never"),
    fsdp2("FSDP2 x 2, reduced once, accumulation 4", 2, 4, reduce="last"),
    fsdp2("FSDP2 x 4", 4),
    fsdp2("HSDP 2 x 2", 4, dp_replicate=2),
    fsdp2("HSDP 2 x 2, accumulation 2", 4, 2, dp_replicate=2),
    fsdp2("HSDP 2 x 2, reduced once, accumulation 2", 4, 2, dp_replicate=2, reduce="last"),
    fsdp2("tensor parallel 2", 2, tp=2),
    fsdp2("FSDP2 x tensor parallel 2 x 2", 4, tp=2),
    fsdp2("FSDP2 x tensor parallel 2 x 2, reduced once, accumulation 2", 4, 2, tp=2, reduce="last"),
    fsdp2("copies x tensor parallel 2 x 2", 4, tp=2, dp_replicate=2),
    Case("one process, Muon", settings={"steps": 10, "train": {"optimizer": "muon"}}),
    muon("FSDP2 x 2", 2),
    muon("HSDP 2 x 2, accumulation 2", 4, 2, dp_replicate=2),
    muon("tensor parallel 2", 2, tp=2),
    muon("FSDP2 x tensor parallel 2 x 2", 4, tp=2),
    muon("copies x tensor parallel 2 x 2", 4, tp=2, dp_replicate=2),
    Case("one process, z-loss", settings={"steps": 10, "train": {"z_loss": 0.03}}),
    z_loss("FSDP2 x 2, accumulation 2", 2, accumulation=2),
    z_loss("tensor parallel 2", 2, parallel={"tp": 2}),
    z_loss("tensor parallel 2, aot_eager", 2, parallel={"tp": 2}, backend="aot_eager"),
    Case("one process, QK-norm and windows", settings={"steps": 10, "shape": DESCENDANT}),
    descendant("FSDP2 x 2, accumulation 2", 2, accumulation=2),
    descendant("HSDP 2 x 2", 4, parallel={"dp_replicate": 2}),
    descendant("tensor parallel 2", 2, parallel={"tp": 2}),
    descendant("FSDP2 x tensor parallel 2 x 2", 4, parallel={"tp": 2}),
    Case("one process, Muon, QK-norm and windows", settings={
        "steps": 10, "shape": DESCENDANT, "train": {"optimizer": "muon"}}),
    Case("tensor parallel 2, Muon, QK-norm and windows", "one process, Muon, QK-norm and windows", 1e-12, 2,
         {"steps": 10, "shape": DESCENDANT, "parallel": {"tp": 2}, "train": {"optimizer": "muon"}}),
    Case("one process, 4 layers", settings={"steps": 10, "shape": FOUR}),
    Case("one process, 4 layers, tied", settings={"steps": 10, "shape": FOUR, "tied": True}),
    Case("one process, 4 layers, Muon", settings={"steps": 10, "shape": FOUR, "train": {"optimizer": "muon"}}),
    Case("one process, 4 layers, bf16", settings={"precision": "bf16", "steps": 10, "shape": FOUR}),
    pipelined("pipeline 2, accumulation 2", 2, 2),
    pipelined("pipeline 2, accumulation 8", 2, 8),
    pipelined("pipeline 3, accumulation 4", 3, 4, pp=3),
    pipelined("pipeline 4, accumulation 4, tied", 4, 4, tied=True, pp=4),
    pipelined("interleaved pipeline 2, accumulation 4", 2, 4, **INTERLEAVED),
    pipelined("interleaved pipeline 2, accumulation 4, tied", 2, 4, tied=True, **INTERLEAVED),
    pipelined("ZBV pipeline 2, accumulation 4", 2, 4, **ZBV),
    pipelined("ZBV pipeline 2 x FSDP2 2, accumulation 4, recomputed", 4, 4, **ZBV,
              train={"activation_checkpointing": "full"}),
    pipelined("ZBV pipeline 2 x tensor parallel 2, accumulation 8", 4, 8, tp=2, **ZBV),
    pipelined("pipeline 2, weights kept, accumulation 4", 2, 4, reshard="never"),
    pipelined("pipeline 2 x FSDP2 2, accumulation 4", 4, 4),
    pipelined("pipeline 2 x HSDP copies 2, accumulation 4", 4, 4, dp_replicate=2),
    pipelined("pipeline 2 x tensor parallel 2, accumulation 2, tied", 4, 2, tied=True, tp=2),
    pipelined("interleaved pipeline 2 x FSDP2 2, accumulation 4", 4, 4, **INTERLEAVED),
    pipelined("pipeline 2 x FSDP2 2 x tensor parallel 2, accumulation 2", 8, 2, tp=2),
    pipelined("pipeline 2 x HSDP 2 x 2, accumulation 2", 8, 2, dp_replicate=2),
    pipelined("pipeline 2 x FSDP2 2, accumulation 2", 4, 2, train={"optimizer": "muon"}),
    pipelined("pipeline 2, accumulation 4, recomputed, aot_eager", 2, 4, backend="aot_eager",
              train={"activation_checkpointing": "full"}),
    pipelined("pipeline 2 x tensor parallel 2, accumulation 2, selective, aot_eager", 4, 2, backend="aot_eager", tp=2,
              train={"activation_checkpointing": "selective"}),
    Case("pipeline 2 x FSDP2 2, accumulation 4, bf16", "one process, 4 layers, bf16", 1e-2, 4, {
        "precision": "bf16", "steps": 10, "shape": FOUR, "accumulation": 4, "parallel": {"pp": 2}}, looser=10),
    Case("pipeline 2, accumulation 4, QK-norm and windows", "one process, QK-norm and windows", 1e-12, 2, {
        "steps": 10, "shape": DESCENDANT, "accumulation": 4, "parallel": {"pp": 2}}),
    context("context parallel 2, accumulation 2", 2, accumulation=2),
    context("context parallel 4", 4, cp=4),
    context("context parallel 2 x FSDP2 2, reduced once, accumulation 2", 4, accumulation=2,
            parallel={"reduce": "last"}),
    context("context parallel 2 x copies 2", 4, parallel={"dp_replicate": 2}),
    context("context parallel 2 x tensor parallel 2", 4, parallel={"tp": 2}),
    context("context parallel 2 x FSDP2 2 x tensor parallel 2", 8, parallel={"tp": 2}),
    context("context parallel 2 x HSDP 2 x 2", 8, parallel={"dp_replicate": 2}),
    context("context parallel 2 x pipeline 2, accumulation 2", 4, "one process, 4 layers", shape=FOUR, accumulation=2,
            parallel={"pp": 2}),
    context("context parallel 2 x pipeline 2 x tensor parallel 2, accumulation 4, tied", 8,
            "one process, 4 layers, tied", shape=FOUR, tied=True, accumulation=4, parallel={"pp": 2, "tp": 2}),
    context("context parallel 2 x interleaved pipeline 2 x FSDP2 2, accumulation 4", 8, "one process, 4 layers",
            shape=FOUR, accumulation=4, parallel={"pp": 2, **INTERLEAVED}),
    context("context parallel 2 x ZBV pipeline 2 x copies 2, accumulation 4", 8, "one process, 4 layers", shape=FOUR,
            accumulation=4, parallel={"pp": 2, "dp_replicate": 2, **ZBV}),
    context("context parallel 2 x pipeline 2 x FSDP2 2, accumulation 2, Muon", 8, "one process, 4 layers, Muon",
            shape=FOUR, accumulation=2, parallel={"pp": 2}, train={"optimizer": "muon"}),
    context("context parallel 2 x pipeline 2 x tensor parallel 2, accumulation 2, 50 steps", 8, "one process, 50 steps",
            steps=50, accumulation=2, parallel={"pp": 2, "tp": 2}),
    context("context parallel 2 x FSDP2 2, Muon", 4, "one process, Muon", train={"optimizer": "muon"}),
    context("context parallel 2, z-loss", 2, "one process, z-loss", train={"z_loss": 0.03}),
    context("context parallel 4, QK-norm and windows", 4, "one process, QK-norm and windows", cp=4, shape=DESCENDANT),
    Case("one process, float32", settings={"precision": "fp32", "steps": 10}),
    checkpointed("all activations recomputed", activation_checkpointing="full"),
    checkpointed("selected activations kept", activation_checkpointing="selective"),
    checkpointed("every second block recomputed", activation_checkpointing="full", recomputed_blocks=2),
    Case("FSDP2 x 2, float32", "one process, float32", 1e-5, 2, {"precision": "fp32", "steps": 10}, looser=10),
    deepspeed("DeepSpeed ZeRO 1 x 2", zero_stage=1),
    deepspeed("DeepSpeed ZeRO 2 x 2", zero_stage=2),
    deepspeed("DeepSpeed ZeRO 2 x 2, accumulation 2", 2, zero_stage=2),
    deepspeed("DeepSpeed ZeRO 3 x 2", zero_stage=3),
    deepspeed("DeepSpeed ZeRO 3 x 2, accumulation 2", 2, zero_stage=3),
    deepspeed("DeepSpeed ZeRO 1 x 2, moments in host memory", zero_stage=1, offload="optimizer"),
    deepspeed("DeepSpeed ZeRO 2 x 2, moments in host memory", zero_stage=2, offload="optimizer"),
    deepspeed("DeepSpeed ZeRO 3 x 2, moments in host memory", zero_stage=3, offload="optimizer"),
    deepspeed("DeepSpeed ZeRO 3 x 2, weights in host memory", 2, zero_stage=3, offload="params"),
    Case("one process, float32, z-loss", settings={"precision": "fp32", "steps": 10, "train": {"z_loss": 0.03}}),
    Case("DeepSpeed ZeRO 3 x 2, z-loss", "one process, float32, z-loss", 1e-5, 2,
         {"precision": "fp32", "steps": 10, "train": {"z_loss": 0.03},
          "parallel": {"engine": "deepspeed", "zero_stage": 3}}, looser=10),
    Case("one process, float32, QK-norm and windows", settings={"precision": "fp32", "steps": 10, "shape": DESCENDANT}),
    Case("DeepSpeed ZeRO 3 x 2, QK-norm and windows", "one process, float32, QK-norm and windows", 1e-5, 2,
         {"precision": "fp32", "steps": 10, "shape": DESCENDANT,
          "parallel": {"engine": "deepspeed", "zero_stage": 3}}, looser=10),
    Case("DeepSpeed ZeRO 2 x 2, compiled", "one process, float32", 1e-5, 2,
         {"precision": "fp32", "steps": 10, "backend": "aot_eager",
          "parallel": {"engine": "deepspeed", "zero_stage": 2}}, looser=10),
    Case("one process, bf16", "one process, float32", 2e-2, 1, {"precision": "bf16", "steps": 10}, looser=5),
    bf16("FSDP2 x 2, bf16"),
    bf16("FSDP2 x 2, reduced once, accumulation 4, bf16", accumulation=4, parallel={"reduce": "last"}),
    bf16("tensor parallel 2, bf16", parallel={"tp": 2}),
    bf16("context parallel 2, bf16", parallel={"cp": 2}),
    bf16("tensor parallel 2, bf16, compiled, recomputed", backend="aot_eager", parallel={"tp": 2},
         train={"activation_checkpointing": "full"}),
    bf16("DeepSpeed ZeRO 1 x 2, bf16", parallel={"engine": "deepspeed", "zero_stage": 1}),
    bf16("DeepSpeed ZeRO 2 x 2, bf16", parallel={"engine": "deepspeed", "zero_stage": 2}),
    bf16("DeepSpeed ZeRO 3 x 2, bf16", parallel={"engine": "deepspeed", "zero_stage": 3}),
    Case("one process, fp8", "one process, bf16", 2e-2, 1, {"precision": "fp8", "steps": 10}, looser=10),
    fp8("all activations recomputed", "one process, fp8", 0.0, train={"activation_checkpointing": "full"}),
    fp8("tensor parallel 2", "one process, fp8", 2e-2, 2, parallel={"tp": 2}),
    fp8("accumulation 2, not clipped", "one process, fp8", 2e-2, accumulation=2, train={"clip_norm": 1e9}),
    fp8("FSDP2 x 2, not clipped", "accumulation 2, not clipped, fp8", 1e-6, 2, train={"clip_norm": 1e9}),
]

CROSSED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "FSDP2 x 2": (2, {}),
    "tensor parallel 2": (2, {"tp": 2}),
    "HSDP 2 x 2": (4, {"dp_replicate": 2}),
    "FSDP2 x tensor parallel 2 x 2": (4, {"tp": 2}),
    "copies x tensor parallel 2 x 2": (4, {"tp": 2, "dp_replicate": 2}),
    "context parallel 2": (2, {"cp": 2}),
    "context x tensor parallel 2 x 2": (4, {"cp": 2, "tp": 2}),
    "pipeline 2": (2, {"pp": 2}),
    "pipeline x context parallel 2 x 2": (4, {"pp": 2, "cp": 2})}
"""Layouts that are crossed with the options: ranks, `parallel`."""
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "every second": {"activation_checkpointing": "full", "recomputed_blocks": 2}}
BACKENDS = (None, "aot_eager", "inductor")
OPTIONS: dict[str, tuple[Any, ...]] = {"layout": tuple(CROSSED), "backend": BACKENDS,
                                       "checkpointing": tuple(CHECKPOINTING), "tied": (False, True)}
OTHERS: dict[str, tuple[Any, ...]] = {"accumulation": (1, 2), "across_documents": (False, True),
                                      "reshard": ("always", "never")}
DESCENDS = {"descends": (False, True)}


def crossing(layout: str, backend: str | None, checkpointing: str, tied: bool, accumulation: int,
             across_documents: bool, reshard: str, descends: bool = False) -> Case:
    """A combination of options over three steps in float64, against one eager process."""
    ranks, parallel = CROSSED[layout]
    named = {backend or "eager": True, "tied": tied, f"checkpointing: {checkpointing}": checkpointing != "none",
             "accumulation 2": accumulation == 2, "across documents": across_documents,
             "weights kept": reshard == "never", "QK-norm and windows": descends}
    name = ", ".join([layout, *(option for option, holds in named.items() if holds)])
    return Case(name, plain(tied, across_documents, descends).name, 1e-12, ranks,
                {"steps": 3, "backend": backend, "tied": tied, "accumulation": accumulation * parallel.get("pp", 1),
                 "shape": shape(descends), "parallel": {**parallel, "reshard": reshard},
                 "train": {**CHECKPOINTING[checkpointing], "across_documents": across_documents}})


def plain(tied: bool, across_documents: bool, descends: bool) -> Case:
    """What the combinations are compared with."""
    name = (f"one process, three steps{', tied' * tied}{', across documents' * across_documents}"
            f"{', QK-norm and windows' * descends}")
    return Case(name, settings={"steps": 3, "tied": tied, "shape": shape(descends),
                                "train": {"across_documents": across_documents}})


def shape(descends: bool) -> dict[str, Any]:
    """What a model has otherwise than a Llama."""
    return DESCENDANT if descends else {}


def full_product() -> dict[tuple[str, bool, str | None, str], Case]:
    """Every layout, backend, checkpointing and tying; the other options take turns, so that each of their eight
    combinations meets each value of these four."""
    others = every(OTHERS)
    return {(chosen["layout"], chosen["tied"], chosen["backend"], chosen["checkpointing"]):
            crossing(**chosen, **others[(number // 8 + number) % 8]) for number, chosen in enumerate(every(OPTIONS))}


def covering() -> list[Case]:
    """Few combinations for `make test`: under tensor parallelism every two values of two options meet, eager and traced
    (aot_eager: the compiler without its code generation); of context parallelism, which `attention_covering` crosses,
    of pipelines, four ranks, one process and inductor, which cost most, one each."""
    few = {**OPTIONS, "layout": ("tensor parallel 2",), "backend": (None, "aot_eager")}
    return [*(crossing(**chosen) for chosen in pairwise({**few, **OTHERS, **DESCENDS})),
            crossing("FSDP2 x tensor parallel 2 x 2", "aot_eager", "full", True, 2, False, "always"),
            crossing("one process", "aot_eager", "selective", False, 2, False, "never", True),
            crossing("tensor parallel 2", "inductor", "full", True, 1, False, "always", True),
            crossing("context parallel 2", "aot_eager", "full", True, 2, True, "never", True),
            crossing("pipeline 2", "aot_eager", "selective", True, 2, True, "always", True),
            crossing("pipeline x context parallel 2 x 2", "aot_eager", "full", False, 1, False, "never", True)]


def attending(by: str, layout: str, backend: str | None, checkpointing: str, tied: bool, descends: bool) -> Case:
    """Attention inside documents in another way than by the dense mask, which one eager process has."""
    ranks, parallel = CROSSED[layout]
    name = (f"{by.rpartition(':')[2]}, {layout}, {backend or 'eager'}, checkpointing: {checkpointing}{', tied' * tied}"
            f"{', QK-norm and windows' * descends}")
    return Case(name, masked(tied, descends).name, 1e-12, ranks,
                {"steps": 3, "backend": backend, "tied": tied, "shape": shape(descends), "parallel": parallel,
                 "train": {**CHECKPOINTING[checkpointing], "attention": by}})


def masked(tied: bool, descends: bool) -> Case:
    """What these are compared with."""
    return Case(f"dense mask{', tied' * tied}{', QK-norm and windows' * descends}", settings={
        "steps": 3, "tied": tied, "shape": shape(descends), "train": {"attention": "sdpa"}})


def attention_covering() -> list[Case]:
    """Every two values of two options meet, of layouts up to two ranks and of no or traced compiling; one of each of
    the dear ones."""
    options = {"layout": ("one process", "FSDP2 x 2", "tensor parallel 2", "context parallel 2"),
               "checkpointing": tuple(CHECKPOINTING), "tied": (False, True), **DESCENDS}
    return [*(attending("by_document", backend=None, **chosen) for chosen in pairwise(options)),
            *(attending(NAME, **chosen) for chosen in pairwise({**options, "backend": (None, "aot_eager")})),
            attending(NAME, "tensor parallel 2", "inductor", "selective", False, True),
            attending(NAME, "context parallel 2", "inductor", "selective", False, True),
            attending(NAME, "context x tensor parallel 2 x 2", "aot_eager", "full", True, True),
            attending("by_document", "FSDP2 x tensor parallel 2 x 2", None, "selective", True, False)]


ATTENTION = attention_covering()
REFERENCES = [*(masked(tied, descends) for tied in (False, True) for descends in (False, True)),
              *(plain(*chosen) for chosen in itertools.product((False, True), repeat=3))]
CASES = {case.name: case for case in (*LAYOUTS, *REFERENCES, *ATTENTION, *covering(), *full_product().values())}


def lacks(case: Case) -> str:
    """What a case needs that this machine does not have; empty where there is all."""
    if case.settings.get("precision") == "fp8" and importlib.util.find_spec("torchao") is None:
        return "no torchao, which fp8 needs: pip install --editable '.[fp8]'"
    needs = {"inductor": case.settings.get("backend") == "inductor", "DeepSpeed": kind_of(case) == "deepspeed"}
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if any(needs.values()) and not any(map(shutil.which, compilers)):
        return f"no C++ compiler, which {next(who for who, holds in needs.items() if holds)} needs on a CPU"
    return ""


def kind_of(case: Case) -> str:
    """Which cases can share a start: DeepSpeed leaves state of its own in a process."""
    return "deepspeed" if case.settings.get("parallel", {}).get("engine") == "deepspeed" else ""


@functools.cache
def run(name: str) -> dict[str, Any]:
    """What a case gave: see `train_steps`."""
    case = CASES[name]
    return run_case(case.ranks, kind_of(case), case.settings)


def results(name: str) -> torch.Tensor:
    """(steps, 2) float64: loss and gradient norm of each step."""
    return torch.tensor(run(name)["results"], dtype=torch.float64)


def differences(name: str) -> dict[str, float]:
    """How far a case is from its reference: `loss and norm`, and each parameter's gradient by name; 0 is equal to the
    last bit. A gradient that only one of the two has is infinitely far."""
    reference = CASES[name].reference
    assert reference is not None
    expected, found = results(reference), results(name)
    away = {"loss and norm": float(((found - expected).abs() / expected.abs()).max())}
    for theirs, ours in zip(run(reference)["gradients"], run(name)["gradients"], strict=True):
        for parameter in theirs.keys() | ours.keys():
            away[parameter] = max(away.get(parameter, 0.0), _distance(ours.get(parameter), theirs.get(parameter)))
    return away


def _distance(ours: np.ndarray | None, theirs: np.ndarray | None) -> float:
    if ours is None or theirs is None or not np.isfinite(ours).all():
        return np.inf
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
