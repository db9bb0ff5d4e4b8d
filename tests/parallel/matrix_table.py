"""The matrix as a table: `make matrix` runs every case and writes docs/matrix.md.

`python -m tests.parallel.matrix_table --store` keeps the losses that later versions are held to.
"""

import json
import platform
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap

import torch

from drover.model.kernels import vendor
from drover.pipeline.core.console import markdown
from tests.parallel.groups import REPOSITORY, CaseError
from tests.parallel.matrix import (
    ATTENTION,
    BACKENDS,
    CHECKPOINTING,
    CROSSED,
    LAYOUTS,
    STORED,
    Case,
    differences,
    full_product,
    lacks,
    run,
)

TABLE = REPOSITORY / "docs/matrix.md"
FAULTS: list[str] = []
"""The cases that are beyond their bounds, or failed."""


def machine() -> str:
    """What the last bits of a float depend on."""
    return f"torch {torch.__version__.split('+')[0]}, {vendor()}, {torch.backends.cpu.get_cpu_capability()}"


def shown(case: Case) -> tuple[str, str]:
    """How far a case's losses and its gradients are, for the table; printed on the way, since it takes minutes."""
    if lacks(case):
        return "not run", "not run"
    try:
        away = differences(case.name)
    except CaseError as error:
        FAULTS.append(f"{case.name}: {str(error).splitlines()[-1]}")
        return "fails", "fails"
    FAULTS.extend(f"{case.name}: {what} differs by {value:.1e}, allowed is {case.allows(what):.0e}"
                  for what, value in away.items() if not value <= case.allows(what))
    losses, gradients = (f"{value:.1e}" if value else "equal"
                         for value in (away.pop("loss and norm"), max(away.values())))
    print(f"{case.name}: {losses}, gradients {gradients}", file=sys.stderr, flush=True)
    return losses, gradients


def bounds(case: Case) -> str:
    """What is allowed, for the table: of losses and norms, and where it is another, of gradients."""
    both = [f"{case.allows(what):.0e}" for what in ("loss and norm", "gradients")]
    return ", ".join(dict.fromkeys(both)) if case.bound else "equal"


def section(title: str, text: str, heads: list[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A part of the page, as Markdown."""
    return [title, "", *wrap(text, 118), *[""] * bool(text), *markdown([heads, *(list(map(str, row)) for row in rows)]),
            ""]


def table() -> str:
    """The matrix with measured differences, as Markdown."""
    product = full_product()
    columns = [(tied, kept) for tied in (False, True) for kept in CHECKPOINTING]
    missing = sorted({lack for case in product.values() if (lack := lacks(case))})
    return "\n".join([
        "# The matrix: every engine computes the same", "", *wrap(
            f"Made by `make matrix`; `tests/parallel/test_matrix.py` holds cases of it to the bounds. A difference is "
            f"the largest relative one from the case compared with: in the loss and gradient norm of any step, and in "
            f"the gradient of any parameter (norm of the difference over norm, whole tensors, first step and last); "
            f"`equal` is to the last bit. A decoder of three blocks on packed documents, {machine()}, gloo on "
            f"{platform.machine()}. A descendant has heads of another width, biases of queries, keys and values, "
            f"QK-norm, windows and a layer without rotary embedding.", 118), "",
        *section("## Layouts", "", ["case", "ranks", "steps", "compared with", "loss, norm", "gradients", "bounds"],
                 ((case.name, case.ranks, case.settings["steps"], case.reference, *shown(case), bounds(case))
                  for case in LAYOUTS)),
        *section("## Options crossed",
                 "Every layout with every way to compile, every activation checkpointing, and tied embeddings, in "
                 "float64 over three steps; accumulation over two micro-batches, attention across documents and "
                 "`reshard=never` take turns. Shown is the largest difference of any parameter's "
                 "gradient from one eager process; losses, norms and gradients are all held to 1e-12.",
                 ["layout", "compiled by", *(f"{kept}{', tied' if tied else ''}" for tied, kept in columns)],
                 ((layout, backend or "nothing", *(shown(product[layout, tied, backend, kept])[1]
                                                   for tied, kept in columns))
                  for layout in CROSSED for backend in BACKENDS)),
        *(f"Not run: {lack}.\n" for lack in missing),
        *section("## Attention inside documents",
                 "Document by document, and varlen's operator with a kernel for the CPU that the tests register, "
                 "against the dense mask in one process: float64, three steps, every two values of two options "
                 "together. All are held to 1e-12.", ["case", "ranks", "loss, norm", "gradients"],
                 ((case.name, case.ranks, *shown(case)) for case in ATTENTION))])


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
    print("\n".join(FAULTS))
    return 1 if FAULTS else 0


if __name__ == "__main__":
    sys.exit(main())
