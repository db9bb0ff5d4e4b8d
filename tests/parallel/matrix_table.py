"""The matrix as a table: `make matrix` runs every case and writes docs/matrix.md.

`python -m tests.parallel.matrix_table --store` keeps the losses that later versions are held to.
"""

import json
import math
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap

import torch

from drover.model.linear import vendor
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


def measured(case: Case) -> tuple[float, float]:
    """The differences of a case's losses and of its gradients; NaN for a case that fails, or cannot run here. Printed
    on the way, since it takes minutes."""
    if lacks(case):
        return math.nan, math.nan
    try:
        away = differences(case.name)
    except CaseError as error:
        FAULTS.append(f"{case.name}: {str(error).splitlines()[-1]}")
        return math.nan, math.nan
    FAULTS.extend(f"{case.name}: {what} differs by {value:.1e}, allowed is {case.allows(what):.0e}"
                  for what, value in away.items() if not value <= case.allows(what))
    losses, gradients = away.pop("loss and norm"), max(away.values())
    print(f"{case.name}: {written(losses)}, gradients {written(gradients)}", file=sys.stderr, flush=True)
    return losses, gradients


def written(value: float) -> str:
    """A difference, for the table."""
    return "none" if math.isnan(value) else f"{value:.1e}" if value else "equal"


def largest(cases: Iterable[Case]) -> str:
    """The largest difference of a gradient in these cases; `none` if one of them has no result."""
    result = [measured(case)[1] for case in cases]
    return written(math.nan if any(map(math.isnan, result)) else max(result))


def section(title: str, text: str, heads: list[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A part of the page, as Markdown."""
    return [title, "", *wrap(text, 118), "", *markdown([heads, *rows]), ""]


def layouts() -> Iterator[list[str]]:
    """Rows of the first table, by what the cases are compared with and what is allowed."""
    for (reference, *bounds), cases in groupby(sorted(LAYOUTS, key=compared), key=compared):
        allowed = "equal" if not bounds[0] else ", ".join(dict.fromkeys(f"{bound:.0e}" for bound in bounds))
        yield [f"**{reference}** ({allowed})", ""]
        yield from ([case.name, ", ".join(map(written, measured(case)))] for case in cases)


def compared(case: Case) -> tuple[str, float, float]:
    """What a case is compared with, and what is allowed: of losses and norms, and of gradients."""
    return str(case.reference), case.allows("loss and norm"), case.allows("gradients")


def table() -> str:
    """The matrix with measured differences, as Markdown."""
    product = full_product()
    attention: dict[tuple[str, str], list[Case]] = {}
    for case in ATTENTION:
        kind, layout = case.name.split(", ")[:2]
        attention.setdefault((layout, kind), []).append(case)
    missing = sorted({lack for case in product.values() if (lack := lacks(case))})
    return "\n".join([
        "# The matrix: every engine computes the same", "", *wrap(
            f"Made by `make matrix`; `tests/parallel/test_matrix.py` holds cases of it to the bounds. A difference is "
            f"the largest relative one from the case compared with: in the loss and gradient norm of any step, and in "
            f"the gradient of any parameter (as whole tensors, first step and last); "
            f"`equal` is to the last bit. A decoder of three blocks on packed documents, {machine()}, gloo on "
            f"{platform.machine()}.", 118), "",
        *section("## Layouts", "Bold: what the cases below it are compared with, and the bounds. Five steps, or as "
                 "named.", ["case", "difference: losses and norms, gradients"], layouts()),
        *section("## Options crossed",
                 "Every layout with every way to compile, activation checkpointing (none, full, selective, every "
                 "second block) and tied embeddings, in float64 over three steps. A cell has the largest difference of "
                 "any gradient from one eager process in its eight cases. All are held to 1e-12.",
                 ["layout", *(backend or "not compiled" for backend in BACKENDS)],
                 ([layout, *(largest(product[layout, tied, backend, kept] for tied in (False, True)
                                     for kept in CHECKPOINTING) for backend in BACKENDS)] for layout in CROSSED)),
        *(f"Not run: {lack}.\n" for lack in missing),
        *section("## Attention inside documents",
                 "Document by document, and varlen's operator with a kernel for CPUs of the tests, against the dense "
                 "mask in one process: float64, three steps, every two values of two options together. The largest "
                 "difference of any gradient; all are held to 1e-12.", ["layout", "attention", "cases", "gradients"],
                 ([layout, kind, str(len(cases)), largest(cases)] for (layout, kind), cases in attention.items()))])


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
