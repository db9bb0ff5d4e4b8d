"""Documents scored by a fastText model that you give, and what all filters with such a model share.

fastText-community reads the models: of the packages with fastText it has wheels for Python 3.11 to 3.14, and it also
trains (`drover classifier train`). Its probabilities equal those of the other packages.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field

from drover.pipeline.config.section import LocalPath, execution
from drover.pipeline.config.shipped import name_of
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter

LABEL = "__label__"
BINS = 20
"""Bins in the histogram of scores, each 0.05 wide."""
_HEAD = struct.Struct("<I4xI52xIII16x")
"""The head of a model's file: MAGIC, the size of its vectors, and the numbers of words and labels, of words, and of
labels."""
MAGIC = 793712314
_ENTRY = re.compile(rb"([^\0]*)\0.{9}", re.DOTALL)
"""A word or label in a model's file, with its count and type. All words come first."""
DIGITS = 6
"""Decimal places of a score: fastText computes in float32."""


class FastText(Filter):
    """A filter with a fastText model that labels texts."""

    needs = "fasttext"

    path: LocalPath = execution()
    """The model's file (.ftz or .bin). Only its content counts, not its place."""

    def reads(self) -> list[Path]:
        """The model's file."""
        return [Path(self.path)]

    def refuse_unknown(self, setting: str, labels: Iterable[str]) -> None:
        """UserError if the model does not know the labels that a setting names, or is none."""
        path = Path(self.path)
        if not path.is_file():
            raise UserError(f"The model {path} of the filter {name_of(self)} is not there. Correct `path`.")
        known = labels_of(str(path))
        if unknown := [label for label in labels if label not in known]:
            typed = unknown[0].lower()
            nearest = sorted(known, key=lambda label: ([label[:end] != typed[:end] for end in (3, 2, 1)], label))[:5]
            raise UserError(f"The filter {name_of(self)} names {', '.join(unknown)}, but the model {self.path} knows "
                            f"{len(known)} labels; the nearest are {', '.join(nearest)}. Correct "
                            f"`{setting}`.")

    def probabilities(self, text: str, labels: int | None = None) -> dict[str, float]:
        """The most probable labels of a text, all by default, and their probabilities; none for a text without
        words."""
        names, values = loaded(str(self.path)).predict(one_line(text), k=labels or len(labels_of(str(self.path))),
                                                       threshold=-1.0)
        return {label.removeprefix(LABEL): float(value) for label, value in zip(names, values, strict=True)}


def one_line(text: str) -> str:
    """A text as fastText reads it to its end: one line without the word that ends one. It takes NUL for white space, as
    it does what else splits lines."""
    return text.replace("\n", " ").replace("</s>", " ")


@lru_cache(maxsize=2)
def labels_of(path: str) -> set[str]:
    """The labels of a fastText model, by its file, of which the weights are not read. UserError if it is none."""
    if not _is_complete(path):
        raise _no_model(path, "it does not begin or end as one does, so a part may be missing")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _, _, entries, words, _ = _HEAD.unpack(data[:_HEAD.size])
        return {match[1].decode(errors="replace").removeprefix(LABEL)  # no setting can name one that is not UTF-8
                for match in islice(_ENTRY.finditer(data, _HEAD.size), words, entries)}


def _no_model(path: str, why: object) -> UserError:
    return UserError(f"The file {path} is no fastText model with labels: {why}. Give one that was trained with labels, "
                     f"such as lid.176.ftz for languages.")


@lru_cache(maxsize=2)
def loaded(path: str) -> Any:
    """A fastText model."""
    import fasttext
    try:
        return fasttext.load_model(path)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise _no_model(path, error) from None


def _is_complete(path: str) -> bool:
    """Whether a file begins as a model and ends with the matrix of the labels that its beginning announces, plain or
    quantized. From a part of a model fastText reads without end, or makes a model of zeros."""
    with open(path, "rb") as file:
        magic, dim, _, _, labels = _HEAD.unpack(file.read(_HEAD.size).ljust(_HEAD.size))
        quantized = 20 + labels * ((dim + 1) // 2) + 1024 * dim
        shape = struct.pack("<qq", labels, dim)
        end = file.seek(0, os.SEEK_END) - len(shape)
        return magic == MAGIC and any(os.pread(file.fileno(), len(shape), max(0, end - size)) == shape
                                      for size in (4 * labels * dim, quantized, quantized + labels + 1040))


class Classifier(FastText):
    """Scores documents by the probability of a label, and drops those with a low score.

    Any fastText model can be used: DCLM's, whose label is hq, one that grades educational value, or yours, made by
    `drover classifier train`. The model reads the text as one line. The score, a number from 0 to 1 with six decimal
    places, goes into the document's metadata as NAME_score, where NAME is the filter's name: classifier_score. A field
    of that name is replaced. The data card has a histogram of the scores.
    """

    label: str
    """The label whose probability is the score, as the model writes it, without __label__: hq."""
    min_score: float | None = Field(None, ge=0, le=1)
    """Documents with a lower score are dropped; null: none. To keep a share of a source instead, set the source's
    `keep`."""

    def open(self) -> None:
        """See Filter."""
        self.refuse_unknown("label", [self.label])

    @property
    def score_field(self) -> str:
        """The name of the score in a document's metadata."""
        return f"{name_of(self)}_score"

    @cached_property
    def _histogram(self) -> dict[str, dict[str, int]]:
        return {f"{number / BINS:.2f}": {"kept": 0, "dropped": 0} for number in range(BINS)}

    def findings(self) -> Record:
        """How many documents it kept and dropped, by the lower end of the scores' bins."""
        return {"scores": self._histogram}

    def score(self, text: str) -> float:
        """The probability of the label."""
        return round(self.probabilities(text).get(self.label, 0.0), DIGITS)

    def __call__(self, document: Document) -> Document | str:
        score = self.score(document.text)
        is_low = self.min_score is not None and score < self.min_score
        self._histogram[f"{min(int(score * BINS), BINS - 1) / BINS:.2f}"]["dropped" if is_low else "kept"] += 1
        if is_low:
            document.meta[self.score_field] = score  # for dropped/
            return f"with a score below {self.min_score:g}"
        return replace(document, meta={**document.meta, self.score_field: score})
