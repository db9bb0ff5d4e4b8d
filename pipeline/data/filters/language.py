"""Documents in unwanted languages, recognized by a fastText model that you give."""

from __future__ import annotations

import difflib
from collections import Counter
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from drover.pipeline.config.section import LocalPath, execution
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter

_LABEL = "__label__"
_ALL = 1_000_000
"""Labels to ask for where all are wanted: more than any model has."""


class Language(Filter):
    """Drops documents in other languages than `languages`, and those whose language the model is not sure of.

    A fastText model labels the text as one line; its most probable label decides. Any model that recognizes languages
    can be used: lid.176.ftz or lid.176.bin, whose labels have two letters, or GlotLID's, with labels like eng_Latn.
    """

    needs = "fasttext"

    path: LocalPath = execution()
    """The model's file (.ftz or .bin). Only its content counts, not its place."""
    languages: list[str] = Field(min_length=1)
    """Labels that are kept, as the model writes them, without __label__: [en, de], or [eng_Latn]."""
    min_probability: float = Field(0.65, ge=0, le=1)
    """Least probability of the most probable language."""
    keep_unknown: bool = False
    """Keep documents whose most probable language has a lower probability than `min_probability`."""
    characters: int | None = Field(None, gt=0)
    """Classify only this many characters from the start of a document; null: all of it."""

    def reads(self) -> list[Path]:
        """The model's file."""
        return [Path(self.path)]

    def open(self) -> None:
        """Load the model, once a process for any number of units."""
        known = self._model[1]
        if unknown := [name for name in self.languages if name not in known]:
            close = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.3)
            raise UserError(f"The filter {self.name or self.kind} is to keep {', '.join(unknown)}, but the model "
                            f"{self.path} knows {len(known)} labels, among them {', '.join(sorted(known)[:5])}"
                            f"{f'; did you mean {close[0]}?' if close else ''}. Correct `languages`.")

    @cached_property
    def _model(self) -> tuple[Any, set[str]]:
        path = Path(self.path)
        if not path.is_file():
            raise UserError(f"The model {path} of the filter {self.name or self.kind} is not there. Correct `path`.")
        return _loaded(str(path))

    @cached_property
    def _seen(self) -> Counter[str]:
        return Counter()

    def findings(self) -> dict[str, dict[str, int]]:
        """Documents by language; `unknown` counts those whose language the model was not sure of."""
        return {"languages": dict(sorted(self._seen.items()))} if self._seen else {}

    def __call__(self, document: Document) -> Document | str:
        # fastText reads one line, and takes NUL for white space, as it does what splits lines.
        line = document.text[:self.characters].replace("\n", " ")
        labels, probabilities = self._model[0].predict(line, k=1, threshold=-1.0)
        language, probability = (labels[0].removeprefix(_LABEL), float(probabilities[0])) if labels else ("", 0.0)
        if probability < self.min_probability:
            self._seen["unknown"] += 1
            return document if self.keep_unknown else f"of no language with a probability of {self.min_probability:g}"
        self._seen[language] += 1
        return document if language in self.languages else "of another language"


@lru_cache(maxsize=2)
def _loaded(path: str) -> tuple[Any, set[str]]:
    """A fastText model that names languages, and the names of all that it knows."""
    import fasttext
    try:
        model = fasttext.load_model(path)
        labels, _ = model.predict("", k=_ALL, threshold=-1.0)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UserError(f"The file {path} is no fastText model that recognizes languages: {error}. Give one for "
                        f"languages, such as lid.176.ftz.") from None
    return model, {label.removeprefix(_LABEL) for label in labels}
