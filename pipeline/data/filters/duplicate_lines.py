"""Lines that many documents share, such as menus, notices and footers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import Field, PrivateAttr

from drover.pipeline.data.documents import DIGEST_BYTES, Document, digest
from drover.pipeline.data.filters.base import Filter

LINE = np.dtype(f"S{DIGEST_BYTES}")
"""The digest of a line."""


class DuplicateLines(Filter):
    """Removes lines that occur in many documents, from all of them.

    Lines are compared without the white space around them. Empty lines stay. To count the lines, the stage first reads
    the documents once more, with the filters before this one. A document without text left is dropped.
    """

    max_documents: int = Field(gt=0)
    """Lines that occur in more documents are removed. The documents of all sources of the filter are counted together;
    equal ones count each."""
    _frequent: np.ndarray = PrivateAttr()

    def take(self, files: Sequence[Path]) -> None:
        """Read the lines to remove, sorted: 16 bytes of memory each. Before them is one that no line is equal to."""
        self._frequent = np.concatenate([np.zeros(1, LINE), *map(np.load, files)])

    @cached_property
    def _removed(self) -> dict[str, int]:
        return {"lines": 0, "bytes": 0}

    def findings(self) -> dict[str, dict[str, int]]:
        """Lines that it removed, and their bytes with the line ends."""
        return {"removed": self._removed}

    def __call__(self, document: Document) -> Document | str:
        lines = document.text.split("\n")
        own = np.array([digest(line.strip().encode()) for line in lines], LINE)
        stay = self._frequent.take(self._frequent.searchsorted(own), mode="clip") != own
        text = "\n".join(line for line, stays in zip(lines, stay.tolist(), strict=True) if stays)
        self._removed["lines"] += len(lines) - int(stay.sum())
        self._removed["bytes"] += len(document.text.encode()) - len(text.encode())
        return document.with_text(text)
