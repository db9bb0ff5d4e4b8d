"""Every way of spreading a model, run on the same seed and data and compared; `matrix_table` shows it.

A case's difference is the largest relative difference from its reference in any step's loss or gradient norm, or in any
parameter's gradient: the norm of the difference over the norm, of whole tensors, in the first step and the last.
"""

import functools
import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import torch

from drover.pipeline.config.training import ParallelConfig, TrainConfig
from tests.model.varlen_on_cpu import NAME
from tests.parallel.groups import REPOSITORY, run_case
from tests.parallel.train_steps import train_steps


def every(factors):
    """All combinations of the values of `factors` (name -> values), as dicts; the last factor changes fastest."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def pairwise(factors):
    """Combinations in which any two values of two factors meet at least once."""
    return covering(every(factors), dict.items)


def covering(candidates, options, cost=lambda candidate: 1):
    """Few of the candidates, in which any two options meet that meet in one of all.

    options: those of a candidate, as pairs of name and value. Each that is taken holds as many new pairs for its cost
    as any. Greedy, without randomness: the same candidates give the same result.
    """
    left = [(candidate, pairs(options(candidate))) for candidate in candidates]
    missing = set().union(*(held for _, held in left))
    result = []
    while missing:
        best, held = max(left, key=lambda each: len(missing & each[1]) / cost(each[0]))
        missing -= held
        result.append(best)
    return result


def pairs(options):
    """The pairs of options that meet."""
    return set(combinations(options, 2))


STORED = REPOSITORY / "tests/parallel/reference_losses.json"


FOUR = {"layers": 4}
INTERLEAVED = {"pp_schedule": "interleaved"}


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


def plain(settings: dict[str, Any]) -> Case:
    """What a case is compared with unless it names another: one eager process with the same model, arithmetic and
    steps; of a case that says which attention, with the dense mask."""
    alike = {name: settings[name] for name in ("steps", "precision", "tied", "shape") if name in settings}
    train = {name: settings["train"][name] for name in ("optimizer", "z_loss", "across_documents")
             if name in settings["train"]} | ({"attention": "sdpa"} if "attention" in settings["train"] else {})
    shape, precision = settings.get("shape"), settings.get("precision", "")
    options = {f"{settings['steps']} steps": settings["steps"] != 5, "4 layers": shape == FOUR,
               "tied": settings.get("tied"), precision: precision, "Muon": "optimizer" in train,
               "z-loss": "z_loss" in train, "dense mask": "attention" in train,
               "across documents": train.get("across_documents")}
    named = [option for option, holds in options.items() if holds] or ["float64"]
    return Case(", ".join(["one process", *named]), settings={**alike, "train": train})


def case(name: str, ranks: int = 1, *, reference: str | None = None, bound: float = 1e-12, looser: float = 1.0,
         **settings: Any) -> Case:
    """A way to run over 5 steps, unless `settings` say otherwise. Those of the sections `parallel` and `train` of a
    configuration go there."""
    own = {"precision", "steps", "accumulation", "tied", "shape", "backend"}
    for section, fields in (("parallel", ParallelConfig.model_fields), ("train", TrainConfig.model_fields)):
        settings[section] = {key: settings.pop(key) for key in [*settings] if key in fields and key not in own}
    settings = {"steps": 5, **settings}
    return Case(name, reference or plain(settings).name, bound, ranks, settings, looser)


muon = partial(case, optimizer="muon")
z_loss = partial(case, z_loss=0.03)
pipelined = partial(case, shape=FOUR, pp=2)
tied_pipelined = partial(pipelined, tied=True)
context = partial(case, cp=2)
fp32 = partial(case, precision="fp32", bound=1e-5, looser=10)
deepspeed = partial(fp32, ranks=2, engine="deepspeed")
checkpointed = partial(fp32, bound=0.0, looser=1.0)
bf16 = partial(case, ranks=2, precision="bf16", bound=5e-3, looser=10)
"""Other sums round otherwise, by up to 1/256 each."""
fp8 = partial(case, precision="fp8", bound=2e-2, looser=10)
"""Tokens of a micro-batch share a scale: what splits them otherwise, or adds otherwise in bfloat16, rounds otherwise,
by up to 1/16 each. Clipping multiplies by a norm in float32, of other sums."""

LAYOUTS = [
    case("accumulation 4", accumulation=4),
    case("FSDP2 x 2, accumulation 4", 2, accumulation=4),
    case("FSDP2 x 2, reshard=never, accumulation 2", 2, accumulation=2, reshard="never"),
    case("FSDP2 x 2, reduce=last, accumulation 4", 2, accumulation=4, reduce="last"),
    case("FSDP2 x 4", 4),
    case("HSDP 2 x 2, accumulation 2", 4, accumulation=2, dp_replicate=2),
    case("HSDP 2 x 2, reduce=last, accumulation 2", 4, accumulation=2, dp_replicate=2, reduce="last"),
    case("tensor parallel 2", 2, tp=2),
    case("FSDP2 x tensor parallel 2 x 2", 4, tp=2),
    case("FSDP2 x tensor parallel 2 x 2, reduce=last, accumulation 2", 4, accumulation=2, tp=2, reduce="last"),
    case("replicas x tensor parallel 2 x 2", 4, tp=2, dp_replicate=2),
    muon("HSDP 2 x 2, accumulation 2, Muon", 4, accumulation=2, dp_replicate=2),
    muon("FSDP2 x tensor parallel 2 x 2, Muon", 4, tp=2),
    z_loss("FSDP2 x 2, accumulation 2, z-loss", 2, accumulation=2),
    z_loss("tensor parallel 2, z-loss", 2, tp=2),
    z_loss("tensor parallel 2, aot_eager, z-loss", 2, tp=2, backend="aot_eager"),
    pipelined("pipeline 2, accumulation 2", 2, accumulation=2),
    pipelined("pipeline 3, accumulation 4", 3, accumulation=4, pp=3),
    tied_pipelined("pipeline 4, accumulation 4, tied", 4, accumulation=4, pp=4),
    tied_pipelined("interleaved pipeline 2, accumulation 4, tied", 2, accumulation=4, **INTERLEAVED),
    pipelined("pipeline 2 x FSDP2 2, reshard=never, accumulation 4, recomputed", 4, accumulation=4, reshard="never",
              activation_checkpointing="full"),
    tied_pipelined("pipeline 2 x tensor parallel 2, accumulation 2, tied", 4, accumulation=2, tp=2),
    pipelined("pipeline 2 x FSDP2 2, accumulation 2, Muon", 4, accumulation=2, optimizer="muon"),
    pipelined("pipeline 2, accumulation 4, recomputed, aot_eager", 2, accumulation=4, backend="aot_eager",
              activation_checkpointing="full"),
    pipelined("pipeline 2 x tensor parallel 2, accumulation 2, selective, aot_eager", 4, accumulation=2, tp=2,
              backend="aot_eager", activation_checkpointing="selective"),
    pipelined("pipeline 2 x FSDP2 2, accumulation 4, bf16", 4, bound=1e-2, looser=10, precision="bf16",
              accumulation=4),
    context("context parallel 2, accumulation 2", 2, accumulation=2),
    context("context parallel 4", 4, cp=4),
    context("context parallel 2 x FSDP2 2, reduce=last, accumulation 2", 4, accumulation=2, reduce="last"),
    context("context parallel 2 x tensor parallel 2", 4, tp=2),
    tied_pipelined("context parallel 2 x pipeline 2 x tensor parallel 2, accumulation 4, tied", 8, accumulation=4, cp=2,
                   tp=2),
    pipelined("context parallel 2 x pipeline 2 x FSDP2 2, accumulation 2, Muon", 8, accumulation=2, cp=2,
              optimizer="muon"),
    context("context parallel 2 x pipeline 2 x tensor parallel 2, accumulation 2, 50 steps", 8, steps=50,
            accumulation=2, pp=2, tp=2),
    context("context parallel 2 x FSDP2 2, Muon", 4, optimizer="muon"),
    context("context parallel 2, z-loss", 2, z_loss=0.03),
    checkpointed("all activations recomputed", activation_checkpointing="full"),
    checkpointed("selected activations kept", activation_checkpointing="selective"),
    checkpointed("every second block recomputed", activation_checkpointing="full", recomputed_blocks=2),
    fp32("FSDP2 x 2, float32", 2),
    deepspeed("DeepSpeed ZeRO 1 x 2", zero_stage=1),
    deepspeed("DeepSpeed ZeRO 2 x 2, accumulation 2", accumulation=2, zero_stage=2),
    deepspeed("DeepSpeed ZeRO 3 x 2, accumulation 2", accumulation=2, zero_stage=3),
    deepspeed("DeepSpeed ZeRO 1 x 2, optimizer state in host memory", zero_stage=1, offload="optimizer"),
    deepspeed("DeepSpeed ZeRO 2 x 2, optimizer state in host memory", zero_stage=2, offload="optimizer"),
    deepspeed("DeepSpeed ZeRO 3 x 2, optimizer state in host memory", zero_stage=3, offload="optimizer"),
    deepspeed("DeepSpeed ZeRO 3 x 2, weights in host memory", accumulation=2, zero_stage=3, offload="params"),
    deepspeed("DeepSpeed ZeRO 3 x 2, z-loss", zero_stage=3, z_loss=0.03),
    deepspeed("DeepSpeed ZeRO 2 x 2, compiled", zero_stage=2, backend="aot_eager"),
    case("one process, bf16", 1, reference="one process, fp32", bound=2e-2, looser=5, precision="bf16"),
    bf16("FSDP2 x 2, bf16"),
    bf16("FSDP2 x 2, reduce=last, accumulation 4, bf16", accumulation=4, reduce="last"),
    bf16("tensor parallel 2, bf16", tp=2),
    bf16("context parallel 2, bf16", cp=2),
    bf16("tensor parallel 2, bf16, compiled, recomputed", tp=2, backend="aot_eager", activation_checkpointing="full"),
    bf16("DeepSpeed ZeRO 1 x 2, bf16", engine="deepspeed", zero_stage=1),
    bf16("DeepSpeed ZeRO 2 x 2, bf16", engine="deepspeed", zero_stage=2),
    bf16("DeepSpeed ZeRO 3 x 2, bf16", engine="deepspeed", zero_stage=3),
    case("one process, fp8", 1, reference="one process, bf16", bound=2e-2, looser=10, precision="fp8"),
    *(case(f"one process, fp8, {recipe}", 1, reference="one process, bf16", bound=2e-2, looser=10, precision="fp8",
           fp8_recipe=recipe) for recipe in ("rowwise_with_gw_hp", "tensorwise")),
    fp8("all activations recomputed, fp8", bound=0.0, activation_checkpointing="full"),
    fp8("tensor parallel 2, fp8", 2, tp=2),
    fp8("accumulation 2, not clipped, fp8", accumulation=2, clip_norm=1e9),
    fp8("FSDP2 x 2, not clipped, fp8", 2, reference="accumulation 2, not clipped, fp8", bound=1e-6, clip_norm=1e9),
]

CROSSED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "FSDP2 x 2": (2, {}),
    "tensor parallel 2": (2, {"tp": 2}),
    "HSDP 2 x 2": (4, {"dp_replicate": 2}),
    "FSDP2 x tensor parallel 2 x 2": (4, {"tp": 2}),
    "replicas x tensor parallel 2 x 2": (4, {"tp": 2, "dp_replicate": 2}),
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


def crossing(layout: str, checkpointing: str, tied: bool, backend: str | None = None, accumulation: int = 1,
             across_documents: bool = False, reshard: str = "always", attention: str | None = None) -> Case:
    """A combination of options over three steps in float64, against one eager process; one with an `attention` against
    the dense mask."""
    ranks, parallel = CROSSED[layout]
    named = {backend or "eager": True, "tied": tied, f"checkpointing: {checkpointing}": checkpointing != "none",
             "accumulation 2": accumulation == 2, "across documents": across_documents,
             "reshard=never": reshard == "never"}
    name = ", ".join([*([attention.rpartition(":")[2]] if attention else []), layout,
                      *(option for option, holds in named.items() if holds)])
    settings = {"steps": 3, "backend": backend, "tied": tied, "accumulation": accumulation * parallel.get("pp", 1),
                "parallel": {**parallel, "reshard": reshard},
                "train": {**CHECKPOINTING[checkpointing], "across_documents": across_documents,
                          **({"attention": attention} if attention else {})}}
    return Case(name, plain(settings).name, 1e-12, ranks, settings)


def full_product() -> dict[tuple[str, bool, str | None, str], Case]:
    """Every layout, backend, checkpointing and tying; the other options take turns, so that each of their eight
    combinations meets each value of these four."""
    others = every(OTHERS)
    return {(chosen["layout"], chosen["tied"], chosen["backend"], chosen["checkpointing"]):
            crossing(**chosen, **others[(number // 8 + number) % 8]) for number, chosen in enumerate(every(OPTIONS))}


def crossed_covering() -> list[Case]:
    """Few combinations for the tests: under tensor parallelism every two values of two options meet, eager and traced
    (aot_eager: the compiler without its code generation); of context parallelism, which `attention_covering` crosses,
    of pipelines, four ranks, one process and inductor, which cost most, one each."""
    few = {**OPTIONS, "layout": ("tensor parallel 2",), "backend": (None, "aot_eager")}
    return [*(crossing(**chosen) for chosen in pairwise({**few, **OTHERS})),
            crossing("FSDP2 x tensor parallel 2 x 2", "full", True, "aot_eager", 2),
            crossing("one process", "selective", False, "aot_eager", 2, reshard="never"),
            crossing("tensor parallel 2", "full", True, "inductor"),
            crossing("context parallel 2", "full", True, "aot_eager", 2, True, "never"),
            crossing("pipeline 2", "selective", True, "aot_eager", 2, True),
            crossing("pipeline x context parallel 2 x 2", "full", False, "aot_eager", reshard="never")]


def attention_covering() -> list[Case]:
    """Attention inside documents in other ways than by the dense mask: every two values of two options meet, of layouts
    up to two ranks and of no or traced compiling; one of each of the dear ones."""
    options = {"layout": ("one process", "FSDP2 x 2", "tensor parallel 2", "context parallel 2"),
               "checkpointing": tuple(CHECKPOINTING), "tied": (False, True)}
    return [*(crossing(**chosen, attention="by_document") for chosen in pairwise(options)),
            *(crossing(**chosen, attention=NAME) for chosen in pairwise({**options, "backend": (None, "aot_eager")})),
            crossing("tensor parallel 2", "selective", False, "inductor", attention=NAME),
            crossing("context parallel 2", "selective", False, "inductor", attention=NAME),
            crossing("context x tensor parallel 2 x 2", "full", True, "aot_eager", attention=NAME),
            crossing("FSDP2 x tensor parallel 2 x 2", "selective", True, attention="by_document")]


ATTENTION = attention_covering()
COMPARED = [*LAYOUTS, *ATTENTION, *crossed_covering(), *full_product().values()]
CASES = {case.name: case for case in (*(plain(case.settings) for case in COMPARED), *COMPARED)}


def few(cases: Sequence[Case]) -> list[Case]:
    """Those for `make test`: of all that are given, any two options that meet are met in one of them. None that make
    machine code (inductor), which takes a minute; aot_eager traces the same graphs in several times what steps take."""
    return covering([case for case in cases if case.settings.get("backend") != "inductor"], met,
                    lambda case: (case.ranks + 1) * (4 if case.settings.get("backend") == "aot_eager" else 1))


def met(case: Case) -> list[tuple[str, str]]:
    """What a case has otherwise than one eager process in float64, as options with their values. Of
    DeepSpeed's only the stage, which `make test-all` crosses with the others."""
    if kind_of(case):
        return [("zero_stage", str(case.settings["parallel"]["zero_stage"]))] * 2
    named = {**case.settings, **case.settings.get("parallel", {}), **case.settings.get("train", {})}
    for known in ("parallel", "train", "steps", "shape"):
        named.pop(known, None)
    named["accumulation"] = named.get("accumulation", 1) > 1
    axes = {axis: named.get(axis, 1) for axis in ("pp", "cp", "tp", "dp_replicate")}
    named |= {"sharded": case.ranks > math.prod(axes.values()), **{axis: ranks > 1 for axis, ranks in axes.items()}}
    return sorted((name, str(value)) for name, value in named.items() if value and value != "always")


def lacks(case: Case) -> str:
    """What a case needs that this machine does not have; empty where there is all."""
    if case.settings.get("precision") == "fp8" and importlib.util.find_spec("torchao") is None:
        return "no torchao, which fp8 needs: pip install --editable '.[fp8]'"
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if (case.settings.get("backend") == "inductor" or kind_of(case)) and not any(map(shutil.which, compilers)):
        return "no C++ compiler, which inductor and DeepSpeed need on a CPU"
    return ""


def kind_of(case: Case) -> str:
    """Which cases can share a start: DeepSpeed leaves state of its own in a process."""
    return "deepspeed" if case.settings.get("parallel", {}).get("engine") == "deepspeed" else ""


@functools.cache
def run(name: str) -> Any:
    """What a case gave: see `train_steps`."""
    case = CASES[name]
    return run_case(case.ranks, train_steps, kind_of(case), **case.settings)


def results(name: str) -> torch.Tensor:
    """(steps, 2) float64: loss and gradient norm of each step."""
    return torch.tensor(run(name)["results"], dtype=torch.float64)


def differences(name: str) -> dict[str, float]:
    """How far a case is from its reference: `loss and norm`, and each parameter's gradient by name; 0 is equal to the
    last bit. A gradient that only one of the two has is infinitely far."""
    reference = CASES[name].reference
    assert reference is not None
    expected, result = results(reference), results(name)
    away = {"loss and norm": float(((result - expected).abs() / expected.abs()).max())}
    for theirs, ours in zip(run(reference)["gradients"], run(name)["gradients"], strict=True):
        for parameter in theirs.keys() | ours.keys():
            away[parameter] = max(away.get(parameter, 0.0), _distance(ours.get(parameter), theirs.get(parameter)))
    return away


def _distance(ours: np.ndarray | None, theirs: np.ndarray | None) -> float:
    if ours is None or theirs is None or not np.isfinite(ours).all():
        return np.inf
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
