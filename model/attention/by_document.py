"""Document by document: causal attention of each document alone, by kernels without a mask.

Nothing is computed between documents, and nothing above the diagonal that a causal kernel skips. `auto` takes this
backend on CPUs, as measured (benchmarks/RESULTS.md). Neighbouring documents of equal length, such as whole rows, are
one call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drover.model.attention.backend import Backend, Documents, Where
from drover.model.attention.sdpa import Sdpa, dense_mask


class DocumentRun(NamedTuple):
    """Neighbouring documents of equal length.

    documents: how many. length: queries of each. keys: of each. Only a segment has more keys than queries; it is a run
    of its own, with a mask if it has several queries.
    """

    documents: int
    length: int
    keys: int
    mask: Tensor | None = None


HALF_PRECISION_FROM = 512
"""Tokens of a row from which this is faster than the dense mask in bfloat16 on a CPU, as measured. Shorter rows use the
mask. In float32 this is never slower. Only the shape decides, so that a repeated step has the same bits."""

_ALONE = Sdpa()


class ByDocument(Backend):
    """Calls the kernel once for each run of documents of equal length."""

    name = "by_document"
    windows = segments = True
    operators = Sdpa.operators

    def unsupported(self, where: Where) -> str:
        """See Backend. A graph would contain the documents' lengths, which change with every batch."""
        return "cannot be compiled, because every batch has documents of other lengths" if where.compiled else ""

    def prepare(self, documents: Documents, dtype: torch.dtype) -> tuple[DocumentRun, ...] | Tensor:
        """See Backend: runs of documents. The dense mask if it is faster, or if a document is longer than the window,
        which these kernels do not support."""
        short = documents.numbers.shape[1] < HALF_PRECISION_FROM
        beyond = documents.window is not None and max(documents.key_lengths) > documents.window
        if beyond or (short and dtype.itemsize == 2 and documents.numbers.is_cpu):
            return _ALONE.prepare(documents, dtype)
        runs: list[DocumentRun] = []
        for length, keys in zip(documents.lengths, documents.key_lengths, strict=True):
            if runs and runs[-1][1:3] == (length, keys) and length == keys:
                runs[-1] = runs[-1]._replace(documents=runs[-1].documents + 1)
            else:
                masked = keys > length > 1
                mask = dense_mask(length, keys - length, None, documents.numbers.device, dtype) if masked else None
                runs.append(DocumentRun(1, length, keys, mask))
        return tuple(runs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: tuple[DocumentRun, ...] | Tensor) -> Tensor:
        """See Backend."""
        if isinstance(prepared, Tensor):
            return _ALONE.attend(q, k, v, prepared)
        # One split and one concatenation: slicing would create a gradient of the whole row for each document.
        queries = q.flatten(0, 1).split([run.documents * run.length for run in prepared])
        sizes = [run.documents * run.keys for run in prepared]
        rest = k.shape[0] * k.shape[1] - sum(sizes)  # padding keys
        keys, values = (tensor.flatten(0, 1).split([*sizes, rest])[:-1] for tensor in (k, v))
        outputs = []
        for run, *parts in zip(prepared, queries, keys, values, strict=True):
            a, b, c = (part.unflatten(0, (run.documents, -1)) for part in parts)
            outputs.append(_ALONE.attend(a, b, c, run.mask).flatten(0, 1))
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).view(q.shape)
