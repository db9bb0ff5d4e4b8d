"""Every way of spreading a model, run on the same seed and data and compared: `make matrix` writes docs/matrix.md.

`python -m tests.parallel.matrix --store` keeps the losses that later versions are held to.

A case's difference is the largest relative difference from its reference in any step's loss or gradient norm, or in any
parameter's gradient: the norm of the difference over the norm, of whole tensors, in the first step and the last.
"""

import functools
import itertools
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

import numpy as np
import torch

from model.kernels import vendor
from tests.model.varlen_on_cpu import NAME
from tests.parallel.crossing import every, pairwise
from tests.parallel.groups import REPOSITORY, CaseError, run_case
from tests.tiny_models import DESCENDANT

TABLE = REPOSITORY / "docs/matrix.md"
STORED = REPOSITORY / "tests/parallel/reference_losses.json"


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
    bf16("tensor parallel 2, bf16, compiled, recomputed", backend="aot_eager", parallel={"tp": 2},
         train={"activation_checkpointing": "full"}),
    bf16("DeepSpeed ZeRO 1 x 2, bf16", parallel={"engine": "deepspeed", "zero_stage": 1}),
    bf16("DeepSpeed ZeRO 2 x 2, bf16", parallel={"engine": "deepspeed", "zero_stage": 2}),
    bf16("DeepSpeed ZeRO 3 x 2, bf16", parallel={"engine": "deepspeed", "zero_stage": 3}),
]

CROSSED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "FSDP2 x 2": (2, {}),
    "tensor parallel 2": (2, {"tp": 2}),
    "HSDP 2 x 2": (4, {"dp_replicate": 2}),
    "FSDP2 x tensor parallel 2 x 2": (4, {"tp": 2}),
    "copies x tensor parallel 2 x 2": (4, {"tp": 2, "dp_replicate": 2})}
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
                {"steps": 3, "backend": backend, "tied": tied, "accumulation": accumulation, "shape": shape(descends),
                 "parallel": {**parallel, "reshard": reshard},
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
    (aot_eager: the compiler without its code generation); of four ranks, one process and inductor, which cost most, one
    each."""
    few = {**OPTIONS, "layout": ("tensor parallel 2",), "backend": (None, "aot_eager")}
    return [*(crossing(**chosen) for chosen in pairwise({**few, **OTHERS, **DESCENDS})),
            crossing("FSDP2 x tensor parallel 2 x 2", "aot_eager", "full", True, 2, False, "always"),
            crossing("one process", "aot_eager", "selective", False, 2, False, "never", True),
            crossing("tensor parallel 2", "inductor", "full", True, 1, False, "always", True)]


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
    options = {"layout": ("one process", "FSDP2 x 2", "tensor parallel 2"), "checkpointing": tuple(CHECKPOINTING),
               "tied": (False, True), **DESCENDS}
    return [*(attending("by_document", backend=None, **chosen) for chosen in pairwise(options)),
            *(attending(NAME, **chosen) for chosen in pairwise({**options, "backend": (None, "aot_eager")})),
            attending(NAME, "tensor parallel 2", "inductor", "selective", False, True),
            attending("by_document", "FSDP2 x tensor parallel 2 x 2", None, "selective", True, False)]


ATTENTION = attention_covering()
REFERENCES = [*(masked(tied, descends) for tied in (False, True) for descends in (False, True)),
              *(plain(*chosen) for chosen in itertools.product((False, True), repeat=3))]
CASES = {case.name: case for case in (*LAYOUTS, *REFERENCES, *ATTENTION, *covering(), *full_product().values())}


def lacks(case: Case) -> str:
    """What a case needs that this machine does not have; empty where there is all."""
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


def machine() -> str:
    """What the last bits of a float depend on."""
    return f"torch {torch.__version__.split('+')[0]}, {vendor()}, {torch.backends.cpu.get_cpu_capability()}"


def shown(case: Case) -> tuple[str, str]:
    """How far a case's losses and its gradients are, for the table; said on the way, since it takes minutes."""
    if lacks(case):
        return "not run", "not run"
    try:
        away = differences(case.name)
    except CaseError as error:
        print(f"{case.name}: {error}", file=sys.stderr, flush=True)
        return "fails", "fails"
    losses, gradients = (f"{value:.1e}" if value else "equal"
                         for value in (away.pop("loss and norm"), max(away.values())))
    print(f"{case.name}: {losses}, gradients {gradients}", file=sys.stderr, flush=True)
    return losses, gradients


def bounds(case: Case) -> str:
    """What is allowed, for the table: of losses and norms, and where it is another, of gradients."""
    both = [f"{case.allows(what):.0e}" for what in ("loss and norm", "gradients")]
    return ", ".join(dict.fromkeys(both)) if case.bound else "equal"


def table() -> str:
    """The matrix with measured differences, as Markdown."""
    lines = ["# The matrix: every engine computes the same", "", *wrap(
        f"Made by `make matrix`; `tests/parallel/test_matrix.py` holds cases of it to the bounds. A difference is the "
        f"largest relative one from the case compared with: in the loss and gradient norm of any step, and in the "
        f"gradient of any parameter (norm of the difference over norm, whole tensors, first step and last); `equal` is "
        f"to the last bit. A decoder of three blocks on packed documents, {machine()}, gloo on {platform.machine()}.",
        118), "",
             "## Layouts", "",
             "| case | ranks | steps | compared with | loss, norm | gradients | bounds |",
             "|---|---|---|---|---|---|---|"]
    for case in LAYOUTS:
        if case.reference is not None:
            losses, gradients = shown(case)
            lines.append(f"| {case.name} | {case.ranks} | {case.settings['steps']} | {case.reference} | {losses} | "
                         f"{gradients} | {bounds(case)} |")
    return "\n".join([*lines, "", *crossed_table(), "", *attention_table()]) + "\n"


def crossed_table() -> list[str]:
    """The full product: a row for a layout and backend, a column for checkpointing and tying."""
    product = full_product()
    columns = [(tied, kept) for tied in (False, True) for kept in CHECKPOINTING]
    heads = [f"{kept}{', tied' if tied else ''}" for tied, kept in columns]
    lines = ["## Options crossed", "", *wrap(
        "Every layout with every way to compile, every activation checkpointing, and tied embeddings, in float64 over "
        "three steps; accumulation over two micro-batches, attention across documents and weights kept between the "
        "passes take turns. Shown is the largest difference of any parameter's gradient from one eager process; "
        "losses, norms and gradients are all held to 1e-12.", 118),
             "", f"| layout | compiled by | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for layout in CROSSED:
        for backend in BACKENDS:
            cells = [shown(product[layout, tied, backend, kept])[1] for tied, kept in columns]
            lines.append(f"| {layout} | {backend or 'nothing'} | {' | '.join(cells)} |")
    missing = sorted({lack for case in product.values() if (lack := lacks(case))})
    return [*lines, *(f"\nNot run: {lack}." for lack in missing)]


def attention_table() -> list[str]:
    """Attention backends against the dense mask; varlen by a kernel for the CPU that the tests bring."""
    lines = ["## Attention inside documents", "", *wrap(
        "Document by document, and varlen's operator with a kernel for the CPU that the tests register, against the "
        "dense mask in one process: float64, three steps, every two values of two options together. All are held to "
        "1e-12.", 118), "", "| case | ranks | loss, norm | gradients |", "|---|---|---|---|"]
    for case in ATTENTION:
        losses, gradients = shown(case)
        lines.append(f"| {case.name} | {case.ranks} | {losses} | {gradients} |")
    return lines


def faults() -> list[str]:
    """The cases that are beyond their bounds, or failed."""
    found = []
    for name, case in CASES.items():
        if case.reference is None or lacks(case):
            continue
        try:
            found += [f"{name}: {what} differs by {value:.1e}, allowed is {case.allows(what):.0e}"
                      for what, value in differences(name).items() if not value <= case.allows(what)]
        except CaseError as error:
            found.append(f"{name}: {str(error).splitlines()[-1]}")
    return found


def store() -> None:
    """Keep the single process's losses as what later versions must compute, to the last bit."""
    STORED.write_text(json.dumps({"machine": machine(), "results": run("one process, 50 steps")["results"]}) + "\n")


def main() -> int:
    """Write the table; 1 if a case is beyond its bound."""
    if sys.argv[1:] == ["--store"]:
        store()
        return 0
    TABLE.write_text(table(), encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))
    print("\n".join(found := faults()))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
