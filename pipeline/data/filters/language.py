"""Documents in other languages than those asked for, by a fastText model that you give."""

from __future__ import annotations

import difflib
from collections import Counter
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from drover.pipeline.config.section import execution
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter

_LABEL = "__label__"
_ALL = 1_000_000
"""Labels to ask for where all are wanted: more than any model has."""


class Language(Filter):
    """Drops documents in other languages than those asked for, and those of which the model is not sure.

    The likeliest label of a fastText model decides, with its probability, on the text as one line. Any model for
    languages will do: lid.176.ftz or lid.176.bin with two letters a language, GlotLID's with names as eng_Latn.
    """

    needs = "fasttext"

    path: str = execution()
    """The model's file (.ftz or .bin). Its content, not its place, is what counts."""
    languages: list[str] = Field(min_length=1)
    """Labels that are kept, as the model writes them, without __label__: [en, de], or [eng_Latn]."""
    least: float = Field(0.65, ge=0, le=1)
    """Probability of the likeliest language from which on it is believed."""
    keep_unknown: bool = False
    """Keep documents of which the likeliest language is less probable than that."""
    characters: int | None = Field(None, gt=0)
    """Look at so many of a document's first characters; null: at all of it."""

    def reads(self) -> list[Path]:
        """The model's file."""
        return [Path(self.path).expanduser()]

    def open(self) -> None:
        """Load the model, once a process for any number of units."""
        super().open()
        known = self._model.labels
        if unknown := [name for name in self.languages if name not in known]:
            close = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.3)
            raise UserError(f"The filter {self.name or self.kind} is to keep {', '.join(unknown)}, but the model "
                            f"{self.path} knows {len(known)} labels, among them {', '.join(sorted(known)[:5])}"
                            f"{f'; did you mean {close[0]}?' if close else ''}. Correct `languages`.")

    @cached_property
    def _model(self) -> Model:
        [path] = self.reads()
        if not path.is_file():
            raise UserError(f"The model {path} of the filter {self.name or self.kind} is not there. Correct `path`.")
        return _loaded(str(path), path.stat().st_size, path.stat().st_mtime_ns)

    @cached_property
    def _seen(self) -> Counter[str]:
        return Counter()

    def findings(self) -> dict[str, dict[str, int]]:
        """How many documents were in which language; `unknown` are those of which the model was not sure."""
        return {"languages": dict(sorted(self._seen.items()))} if self._seen else {}

    def __call__(self, document: Document) -> Document | str:
        text = document.text if self.characters is None else document.text[:self.characters]
        language, probability = self._model.likeliest(text)
        if probability < self.least:
            self._seen["unknown"] += 1
            return document if self.keep_unknown else f"of no language with a probability of {self.least:g}"
        self._seen[language] += 1
        return document if language in self.languages else "of another language"


class Model:
    """A fastText model that names languages.

    Attributes:
        labels: the names of all languages it knows.
    """

    def __init__(self, path: str) -> None:
        import fasttext
        try:
            self._model: Any = fasttext.load_model(path)
            labels, _ = self._model.predict("", k=_ALL, threshold=-1.0)
        except (ValueError, RuntimeError, MemoryError) as error:
            raise UserError(f"The file {path} is no fastText model that tells languages: {error}. Give one for "
                            f"languages, such as lid.176.ftz.") from None
        self.labels = {label.removeprefix(_LABEL) for label in labels}

    def likeliest(self, text: str) -> tuple[str, float]:
        """The likeliest language of a text and its probability, 0 where there is none."""
        # fastText reads one line, and takes NUL for white space, as it does what splits lines.
        labels, probabilities = self._model.predict(text.replace("\n", " "), k=1, threshold=-1.0)
        return (labels[0].removeprefix(_LABEL), float(probabilities[0])) if labels else ("", 0.0)


@lru_cache(maxsize=2)
def _loaded(path: str, size: int, mtime_ns: int) -> Model:
    """size, mtime_ns: of the file, so that another is read again."""
    return Model(path)
